"""Everything at a glance: nodes, a line of every job, the launches of a span of time."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from pipollux_sched.control import Control
from pipollux_sched.event_line import TELLING_TYPES
from pipollux_sched.occupancy import holding
from pipollux_sched.store import GenerationRecord, JobRecord, Point, Store

from .stream import told_object

MOST_LAUNCHES = 5000
"""Launches of all jobs together: more than a picture has room for."""
MOST_WORDS = 300
"""Characters of a job's message; the job's own page has all of it."""

_LAUNCH = (
    *("job", "generation", "nodes", "num_stages", "launched_at", "first_step_at"),
    *("stopping_at", "ended_at", "outcome", "intent"),
)
_POINT = (
    *("step", "epoch", "num_epochs", "loss", "batch_size", "step_time", "goodput", "efficiency"),
)


def describe_all(store: Store, control: Control, since: float, num_events: int) -> dict[str, Any]:
    """Describe the cluster and all jobs.

    Args:
        store: what is known.
        control: knows the nodes.
        since: launches that had ended by then are left out; seconds since the epoch.
        num_events: so many of the last events that people are told of.
    """
    last_event = store.last_event()  # first, so that whoever listens on from there misses nothing
    points, launches = store.last_points(), store.num_launches()
    found = store.latest_events(num_events, types=TELLING_TYPES) if num_events else []
    told = (told_object(event) for event in found)
    return {
        "time": time.time(),
        **control.cluster(),
        "jobs": [
            _job(job, points.get(job.name), launches.get(job.name, 0)) for job in store.jobs()
        ],
        "launches": [
            _launch(launch) for launch in store.overview.launches_since(since, MOST_LAUNCHES)
        ],
        "events": [event for event in told if event is not None],
        "last_event": last_event,
    }


def _job(job: JobRecord, point: Point | None, num_launches: int) -> dict[str, Any]:
    nodes, num_stages = holding(job)
    shown = {} if point is None else asdict(point)
    return {
        "name": job.name,
        "phase": job.phase.value,
        "reason": job.state.reason,
        "message": job.state.message.partition("\n")[0][:MOST_WORDS],
        "submitted_at": job.submitted_at,
        "ended_at": job.ended_at,
        "nodes": list(nodes),
        "num_stages": num_stages,
        "generation": job.state.generation,
        "intent": job.state.intent,
        "held": job.state.held,
        "num_restarts": max(num_launches - 1, 0),
        **{name: shown.get(name) for name in _POINT},
    }


def _launch(launch: GenerationRecord) -> dict[str, Any]:
    return {name: getattr(launch, name) for name in _LAUNCH}
