"""What is told of jobs, nodes and the cluster, as objects of JSON.

The cluster at a glance has a size of its own, whatever the number of jobs: the database counts,
sorts and cuts.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import asdict
from typing import Any

from pipollux_sched.backend.local.replica_log import last_lines
from pipollux_sched.controller.commands import Control
from pipollux_sched.controller.deletion import DeletedJob
from pipollux_sched.controller.heartbeats import Heartbeats
from pipollux_sched.planning.account import account_object, find_standing
from pipollux_sched.report.event_text import TELLING_TYPES
from pipollux_sched.store import (
    GenerationRecord,
    Holder,
    JobQuery,
    JobRecord,
    JobSummary,
    StaleGenerationError,
    StateDir,
    Store,
)

from .event_stream import event_summary

MOST_GENERATIONS = 5000
"""Generations of all jobs together: more than a picture has room for."""
MOST_WORDS = 300
"""Characters of a job's message; the job's own page has all of it."""

_GENERATION = (
    *("job", "generation", "nodes", "num_stages", "created_at", "first_step_at"),
    *("stopping_at", "ended_at", "outcome", "intent"),
)
_POINT = (
    *("step", "epoch", "num_epochs", "loss", "batch_size", "step_time", "goodput", "efficiency"),
)


def describe_all(
    store: Store, control: Control, query: JobQuery, num_events: int
) -> dict[str, Any]:
    """Describe the cluster, and the jobs of a page.

    Args:
        store: what is known.
        control: knows the nodes.
        query: which jobs.
        num_events: so many of the last events that people are told of.
    """
    last_event = store.last_event()  # first, so that whoever listens on from there misses nothing
    glance, page = store.overview.glance(), store.overview.jobs(query, time.time())
    found = store.latest_events(num_events, types=TELLING_TYPES) if num_events else []
    told = (event_summary(event) for event in found)
    cluster = control.cluster()
    return {
        "time": time.time(),
        "policy": cluster["policy"],
        "nodes": _nodes(cluster["nodes"], glance.holders),
        "phases": {phase.value: count for phase, count in glance.phases.items()},
        "goodput": glance.goodput,
        "oldest_generation": glance.oldest_generation,
        "jobs": [_job(job) for job in page.jobs],
        "num_found": page.num_found,
        "events": [event for event in told if event is not None],
        "last_event": last_event,
    }


def describe_generations(
    store: Store, since: float, nodes: Collection[str] | None
) -> list[dict[str, Any]]:
    """Describe the generations that held something after a moment, on some nodes or on all."""
    found = store.overview.generations_since(since, MOST_GENERATIONS, nodes)
    return [_generation(record, number) for record, number in found]


def describe_usage(store: Store, since: float, num_parts: int) -> dict[str, Any]:
    """Describe how full nodes were from a moment until now; a node nobody held is not told of."""
    now = time.time()
    begin = min(since, now - 1.0)
    return {
        "since": begin,
        "until": now,
        "nodes": store.overview.node_usage(begin, now, num_parts),
    }


def describe_job(
    store: Store, heartbeats: Heartbeats, job: JobRecord, num_points: int
) -> dict[str, Any]:
    """Describe a job.

    Args:
        store: knows it.
        heartbeats: when its replicas were last heard of.
        job: the job.
        num_points: points of its curves at most.
    """
    generations = store.generations(job.name)
    return {
        **job.to_json_object(),
        "number": store.overview.job_number(job.name),
        "hints": store.hints().get(job.name),
        "generations": [asdict(entry) for entry in generations],
        "num_restarts": max(len(generations) - 1, 0),
        "replicas": _replicas(store, heartbeats, job),
        "points": [asdict(point) for point in store.overview.points(job.name, num_points)],
        "noise": [point._asdict() for point in store.overview.noise(job.name, num_points)],
    }


def explain_job(store: Store, job: JobRecord) -> dict[str, Any]:
    """Explain a job's allocation, as `pipollux explain --output json` does."""
    decisions = store.latest_events(1, job=job.name, types=["allocated"])
    return account_object(job, find_standing(store, job), decisions[-1] if decisions else None)


def deleted_object(deleted: DeletedJob) -> dict[str, Any]:
    """Return what is told of a job that was deleted: how it had ended, and what is left of it."""
    state = deleted.job.state
    return {
        "name": deleted.job.name,
        "phase": state.phase,
        "reason": state.reason,
        "left": [str(folder) for folder in deleted.left],
    }


def describe_logs(
    state_dir: StateDir, name: str, generation: int | None, num_lines: int
) -> list[dict[str, Any]]:
    """Describe the last lines of a job's replicas, of one generation or of all."""
    return [
        {"generation": number, "replica": replica, "lines": last_lines(path, num_lines)}
        for number, replica, path in state_dir.logs(name)
        if generation in (None, number)
    ]


def describe_nodes(store: Store, control: Control) -> dict[str, dict[str, Any]]:
    """Describe the nodes by name, each with how many replicas of which jobs are there."""
    holding = {job.name: job.state.running_on for job in store.jobs()}
    return {
        name: {
            "name": name,
            **node,
            "replicas": {job: nodes.count(name) for job, nodes in holding.items() if name in nodes},
        }
        for name, node in control.cluster()["nodes"].items()
    }


def _nodes(nodes: dict[str, dict[str, Any]], holders: Iterable[Holder]) -> dict[str, Any]:
    found = {name: {**node, "used": 0, "num_jobs": 0} for name, node in nodes.items()}
    for holder in holders:
        for name in set(holder.nodes) & found.keys():
            found[name]["used"] += holder.nodes.count(name) * holder.num_stages
            found[name]["num_jobs"] += 1
    return found


def _job(job: JobSummary) -> dict[str, Any]:
    shown = {} if job.point is None else asdict(job.point)
    return {
        "number": job.number,
        "name": job.name,
        "phase": job.phase.value,
        "reason": job.reason,
        "message": job.message.partition("\n")[0][:MOST_WORDS],
        "submitted_at": job.submitted_at,
        "ended_at": job.ended_at,
        "nodes": list(job.nodes),
        "num_stages": job.num_stages,
        "generation": job.generation,
        "intent": job.intent,
        "suspended": job.suspended,
        "num_restarts": job.num_restarts,
        **{name: shown.get(name) for name in _POINT},
    }


def _generation(record: GenerationRecord, number: int) -> dict[str, Any]:
    return {"number": number, **{name: getattr(record, name) for name in _GENERATION}}


def _replicas(store: Store, heartbeats: Heartbeats, job: JobRecord) -> list[dict[str, Any]]:
    """Describe the replicas of the generation that runs, if one does."""
    generation, nodes = job.state.generation, job.state.running_on
    if not nodes:
        return []
    try:
        addresses = store.replicas.find(job.name, generation).addresses
    except StaleGenerationError:  # it has moved on meanwhile
        addresses = {}
    heard = heartbeats.heard(job.name, generation)
    return [
        {
            "replica": replica,
            "node": node,
            "address": addresses.get(replica),
            "heard_seconds": heard[replica].seconds if replica in heard else None,
            "step": heard[replica].step if replica in heard else None,
        }
        for replica, node in enumerate(nodes)
    ]
