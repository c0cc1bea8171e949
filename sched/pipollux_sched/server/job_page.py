"""One job with all that is known of it: state, launches, curves, and who was heard of when."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipollux_sched.controller.deletion import DeletedJob
from pipollux_sched.controller.heartbeats import Heartbeats
from pipollux_sched.planning.account import account_object, find_standing
from pipollux_sched.store import JobRecord, StaleGenerationError, Store


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
    """Say why a job has what it has, as `pipollux explain --output json` does."""
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


def _replicas(store: Store, heartbeats: Heartbeats, job: JobRecord) -> list[dict[str, Any]]:
    """Describe the replicas of the generation that runs, if one does."""
    generation, nodes = job.state.generation, job.state.launched
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
