"""What jobs and users ask over HTTP: hints, progress, heartbeats; jobs, nodes, events.

=======  ==========================  ======  ======================================================
PUT      /jobs/{name}/hints          job     hints of a generation (`SchedHints`)
POST     /jobs/{name}/reports        job     progress of a generation (`TrainingReport`)
POST     /jobs/{name}/heartbeats     job     a sign of life of a replica
POST     /jobs/{name}/replicas       job     where a replica can be reached
GET      /jobs/{name}/replicas       job     where all can; waits until all have said so
POST     /jobs                       admin   submit a job (`JobSpec`)
GET      /jobs                       admin   all jobs
GET      /jobs/{name}                admin   one job, with its generations, hints and curves
DELETE   /jobs/{name}                admin   cancel a job
POST     /jobs/{name}/suspend        admin   suspend it: checkpoint and release its slots
POST     /jobs/{name}/resume         admin   let it go on
GET      /jobs/{name}/explanation    admin   why it has its allocation
GET      /jobs/{name}/logs           admin   the last lines of its replicas
GET      /jobs/{name}/logs/G/R       admin   the log of one replica of a generation
GET      /nodes                      admin   nodes, their condition, and who is there
PUT      /nodes/{name}               admin   drain it, say that it is dead, or ready again
GET      /overview                   admin   nodes, counts and a page of jobs at a glance
GET      /generations                   admin   who held what
GET      /usage                      admin   how full the nodes were
GET      /plan                       admin   what the scheduler would decide now
GET      /report                     admin   the report of a run, as HTML
GET      /events                     admin   the event log
GET      /events/stream              admin   the same as it happens (server-sent events)
GET      /metrics                    admin   figures for Prometheus
GET      /healthz                    none    whether the scheduler is there
GET      /, /web/{file}              none    the web page: nothing of it is data
GET      /openapi.json, /docs        none    this table, at length, and to be tried
=======  ==========================  ======  ======================================================

The admin's token opens everything, a job's what concerns itself alone. Whatever is sent is checked,
limited in size and rate, and refused when a newer generation of the job is there. Every refusal is
``{"detail": "one sentence"}``.
"""

from __future__ import annotations

from pipollux_sched.controller.commands import UnavailableError

from .app import create_app, end_waiting
from .limits import Limits
from .request_bodies import BODY_LIMIT

__all__ = ["BODY_LIMIT", "Limits", "UnavailableError", "create_app", "end_waiting"]
