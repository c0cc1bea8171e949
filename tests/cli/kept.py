"""A store as a scheduler leaves it, made by the store's own transitions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipollux_sched.lifecycle import Allocate, Cancel, Exited, Outcome, Started, Suspend
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import NodeCondition, Point, StateDir, Store

HINTS: dict[str, Any] = {
    "initBatchSize": 32,
    "maxBatchSize": 1024,
    "localBszBounds": [8, 128],
    "maxProfiledReplicas": 2,
    "gradientAccumulation": True,
    "gradParams": {"norm": 0.0021, "var": 0.0385},
    "perfParams": {
        "alpha_c": 0.021,
        "beta_c": 0.0046,
        "alpha_n": 0.058,
        "beta_n": 0.009,
        "alpha_r": 0.019,
        "beta_r": 0.003,
        "gamma": 1.8,
    },
}


class Clock:
    """A clock that is moved by hand."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def spec(name: str, **fields: Any) -> JobSpec:
    return JobSpec.model_validate({"name": name, "script": "train.py", **fields})


def point(step: int, now: float, *, replicas: int = 1, loss: float = 2.5) -> Point:
    return Point(
        time=now,
        step=step,
        epoch=1,
        samples=step * 32,
        loss=loss,
        batch_size=32 * replicas,
        atomic_bsz=32,
        accum_steps=0,
        num_replicas=replicas,
        step_time=0.1,
        predicted_step_time=0.11,
        goodput=290.0 * replicas,
        efficiency=0.92,
        num_epochs=4,
    )


@contextmanager
def kept(state_dir: Path, clock: Clock) -> Iterator[Store]:
    """A store of three nodes, with a job in every state that a user may ask about.

    `grown` trains on two replicas, `wide` holds a node and may not be moved, `waiting` has no room,
    `held` was suspended by its user, `broken` failed, `gone` was cancelled.
    """
    directory = StateDir(state_dir)
    directory.create()
    with Store(directory.database, create=True, clock=clock) as store:
        store.set_nodes(
            (name, 2, "cpu", {"name": name, "slots": 2, "kind": "cpu"})
            for name in ("node-a", "node-b", "node-c")
        )
        described = {name: {"slots": 2, "kind": "cpu"} for name in store.nodes()}
        store.add_event("cluster", {"nodes": described, "policy": "ExactPolicy"})
        jobs = (
            spec("grown", max_replicas=6),
            spec("wide", num_stages=2, preemptible=False),
            spec("waiting", num_stages=2, min_replicas=3, max_replicas=3),
            spec("held"),
            spec("broken", max_restarts=0),
            spec("gone"),
        )
        for job in jobs:
            store.submit(job.name, job.model_dump(mode="json"), "token", job.max_restarts)
        clock.now += 10
        _train(store, clock)
        store.transition("waiting", Allocate((), "waits: there is no room"))
        store.transition("held", Suspend())
        store.transition("broken", Allocate(["node-c"], "starts on 1 replica on node-c"))
        store.transition("broken", Exited(1, Outcome.FAILED, message="it \x1b[31mbroke\nTraceback"))
        store.transition("gone", Cancel())
        store.set_node_condition("node-c", NodeCondition.DRAINING, "new fans")
        clock.now += 60
        yield store


def _train(store: Store, clock: Clock) -> None:
    """Let `grown` go from one replica to two, and `wide` start."""
    wide = Allocate(["node-b"], "starts on 1 replica on node-b", num_stages=2)
    store.transition("wide", wide)
    store.add_report("wide", 1, [point(1, clock.now)])
    store.transition("grown", Allocate(["node-a"], "starts on 1 replica on node-a"))
    store.transition("grown", Started(1, ("4711",)))
    clock.now += 5
    store.add_report("grown", 1, [point(1, clock.now, loss=4.0)])
    store.put_hints("grown", 1, HINTS)
    clock.now += 15
    details = {"speedup": 1.89, "previous_speedup": 1.0, "batch_size": 76}
    store.transition("grown", Allocate(["node-a"] * 2, "grows from 1 to 2 replicas", details))
    clock.now += 2
    store.transition("grown", Exited(1, Outcome.STOPPED, step=20))
    clock.now += 4
    store.add_report("grown", 2, [point(21, clock.now, replicas=2)])
    store.put_hints("grown", 2, HINTS)
