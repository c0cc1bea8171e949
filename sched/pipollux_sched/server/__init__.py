"""REST interface for jobs and users: hints, progress, heartbeats; jobs, nodes, events.

=======  ==========================  ======  ======================================================
PUT      /jobs/{name}/hints          job     hints of an attempt (`SchedHints`)
POST     /jobs/{name}/reports        job     progress of an attempt (`TrainingReport`)
POST     /jobs/{name}/heartbeats     job     heartbeat of a replica
POST     /jobs/{name}/replicas       job     register the address of a replica
GET      /jobs/{name}/replicas       job     all addresses; waits until all are registered
POST     /jobs                       admin   submit a job (`JobSpec`)
GET      /jobs                       admin   all jobs
GET      /jobs/{name}                admin   one job, with its attempts, hints and curves
DELETE   /jobs/{name}                admin   cancel a job
POST     /jobs/{name}/suspend        admin   suspend it: checkpoint and release its slots
POST     /jobs/{name}/resume         admin   resume it
PUT      /jobs/{name}/team           admin   move it to another team
GET      /jobs/{name}/explanation    admin   explain its allocation
GET      /jobs/{name}/logs           admin   the last lines of its replicas
GET      /jobs/{name}/logs/G/R       admin   the log of one replica of an attempt
GET      /nodes                      admin   nodes, their condition, and the jobs on them
PUT      /nodes/{name}               admin   set it draining, dead or ready
GET      /overview                   admin   nodes, counts and a page of jobs at a glance
GET      /attempts                   admin   attempts and the slots that they held
GET      /usage                      admin   slot usage of the nodes
GET      /plan                       admin   what the scheduler would decide now
GET      /report                     admin   the report of a run, as HTML
GET      /events                     admin   the event log
GET      /events/stream              admin   the same live (server-sent events)
GET      /metrics                    admin   Prometheus metrics
GET      /healthz                    none    health check
GET      /, /web/{file}              none    the web page, which contains no data
GET      /openapi.json, /docs        none    OpenAPI document and Swagger UI
=======  ==========================  ======  ======================================================

The admin's token grants access to everything, a job's token to that job alone. Requests are
validated, limited in size and rate, and refused from outdated attempts. Every refusal is
``{"detail": "one sentence"}``.
"""

from __future__ import annotations

from pipollux_sched.controller.commands import UnavailableError

from .app import create_app, end_waiting
from .limits import Limits
from .request_bodies import BODY_LIMIT

__all__ = ["BODY_LIMIT", "Limits", "UnavailableError", "create_app", "end_waiting"]
