"""A large cluster as a scheduler leaves it: 64 nodes of 8 slots and 1000 jobs in all phases.

The rows are made by the store's own transitions, in one transaction, at times of their own.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from sqlalchemy.orm import Session

from pipollux_sched.lifecycle import (
    Allocate,
    Cancel,
    Event,
    Exited,
    FirstStep,
    JobState,
    Outcome,
    Started,
    Submit,
    Suspend,
)
from pipollux_sched.store import Point, journal
from pipollux_sched.store import nodes as node_rows
from pipollux_sched.store.database import Database
from pipollux_sched.store.tables import EventRow, JobRow, PointRow
from tests.sched.store.stores import point

NUM_NODES, NUM_SLOTS, NUM_JOBS = 64, 8, 1000
HISTORY = 3 * 3600.0
"""Seconds back to which there were attempts."""
PHASES = {
    "Running": 112,
    "Stopping": 4,
    "Restarting": 6,
    "Queued": 718,
    "Suspended": 12,
    "Failed": 18,
    "Cancelled": 10,
    "Complete": 120,
}
"""Of 1000 jobs; the same shares of fewer, rounded down, and Queued what is missing."""
KINDS = ("char-lm", "resnet", "gpt2-small", "digits", "bert-tiny")


ENDINGS: dict[str, tuple[Event, ...]] = {
    "Stopping": (Suspend(),),
    "Suspended": (Suspend(), Exited(1, Outcome.STOPPED, step=30)),
    "Restarting": (Exited(1, Outcome.FAILED, message="RuntimeError: a peer went away"),),
    "Failed": (Exited(1, Outcome.FAILED, message="ValueError: no such data set"),),
    "Complete": (Exited(1, Outcome.COMPLETE, step=40, epoch=2),),
}
"""How a job comes into its phase that trained."""


@dataclass
class _Cluster:
    """Who may hold what: the slots of every node that are free at the end of its history."""

    session: Session
    now: float
    names: list[str]
    held: dict[str, list[tuple[float, float, int]]] = field(default_factory=dict)
    """Who held how many slots of a node from when to when."""
    points: list[tuple[EventRow, Point]] = field(default_factory=list)

    def happen(self, job: JobRow, time: float, *events: Event) -> None:
        for event in events:
            journal.advance_job(self.session, job, event, time)

    def place(self, begin: float, end: float, replicas: int, stages: int) -> list[str]:
        """Take slots for as many of the replicas as there is room for throughout, one at least."""
        found: list[str] = []
        for node in self.names:
            held = self.held.setdefault(node, [])
            used = sum(slots for low, high, slots in held if low < end and begin < high)
            many = min((NUM_SLOTS - used) // stages, replicas - len(found))
            if many > 0:
                held.append((begin, end, many * stages))
                found += [node] * many
        assert found, "there are too many jobs for these nodes"
        return found


def crowd(
    path: Path, now: float, *, num_jobs: int = NUM_JOBS, num_nodes: int = NUM_NODES
) -> dict[str, int]:
    """Make a store; return how many jobs are in each phase as people are told it."""
    chance = random.Random(15)  # noqa: S311  # the same store each time
    shares = {name: share * num_jobs // 1000 for name, share in PHASES.items()}
    shares["Queued"] += num_jobs - sum(shares.values())
    database = Database(path, create=True)
    try:
        with database.write() as session:
            names = [f"node-{number:02}" for number in range(num_nodes)]
            described = {name: {"slots": NUM_SLOTS, "kind": "gpu"} for name in names}
            rows = [(name, NUM_SLOTS, "gpu", {"name": name, **described[name]}) for name in names]
            node_rows.remember(session, rows, now - HISTORY)
            about = {"nodes": described, "policy": "ExactPolicy"}
            journal.log(session, now - HISTORY, "cluster", None, None, about)
            cluster = _Cluster(session, now, names)
            phases = [name for name, share in shares.items() for _ in range(share)]
            chance.shuffle(phases)
            jobs = [_submitted(session, now, number) for number in range(num_jobs)]
            session.flush()
            for job, phase in zip(jobs, phases, strict=True):
                _live(cluster, job, phase, chance)
            session.flush()  # gives the events their ids
            session.add_all(
                PointRow(event=entry.id, job=entry.job, **asdict(each))
                for entry, each in cluster.points
            )
    finally:
        database.close()
    return {name: share for name, share in shares.items() if share}


def _submitted(session: Session, now: float, number: int) -> JobRow:
    name = f"{KINDS[number % len(KINDS)]}-{number:04}"
    stages = (1, 1, 2, 4)[number % 4]
    spec = {"name": name, "script": "/srv/jobs/train.py", "num_stages": stages, "max_replicas": 8}
    begun = now - HISTORY + 0.9 * HISTORY * number / NUM_JOBS
    job = JobRow(name=name, submitted_at=begun, spec=spec, token=f"token-{number}")
    journal.write_job_state(job, JobState())
    session.add(job)
    journal.log(session, begun, "submitted", name, None, {"spec": spec})
    return job


def _live(cluster: _Cluster, job: JobRow, phase: str, chance: random.Random) -> None:
    begun = job.submitted_at
    cluster.happen(job, begun, Submit(0 if phase == "Failed" else 3))
    if phase == "Queued":
        cluster.happen(job, begun + 1, Allocate((), "waits: no node has room for its stages"))
    elif phase == "Cancelled":
        cluster.happen(job, begun + 60, Cancel())
    else:
        _run(cluster, job, phase, chance)


def _run(cluster: _Cluster, job: JobRow, phase: str, chance: random.Random) -> None:
    stages = job.spec["num_stages"]
    replicas = chance.randint(1, max(3 // stages, 1))
    at = job.submitted_at + chance.uniform(5, 300)
    # One that restarts keeps the slots that it was given.
    holds = phase in ("Running", "Stopping")
    end = cluster.now if holds else at + chance.uniform(0.05, 0.95) * (cluster.now - at)
    until = cluster.now if phase == "Restarting" else end
    nodes = cluster.place(at, until, replicas, stages)
    words = f"starts on {len(nodes)} replica{'s' * (len(nodes) > 1)}"
    cluster.happen(job, at, Allocate(nodes, words, num_stages=stages))
    cluster.happen(job, at + 4, Started(1, ("1",)), FirstStep(1, 1))
    entry = journal.log(cluster.session, end, "progress", job.name, 1, {})
    cluster.points.append((entry, _point(job, chance, end, len(nodes))))
    cluster.happen(job, end, *ENDINGS.get(phase, ()))


def _point(job: JobRow, chance: random.Random, time: float, replicas: int) -> Point:
    return replace(
        point(chance.randrange(10, 3000)),
        time=time,
        loss=chance.uniform(0.3, 4.0),
        batch_size=8 * replicas,
        num_replicas=replicas,
        goodput=replicas * chance.uniform(50.0, 90.0),
    )
