"""The events and rows of a job that resizes, made by the store's own transitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pipollux_sched.lifecycle import (
    Allocate,
    ChangeRefused,
    ElasticReady,
    Event,
    Exited,
    FirstStep,
    Outcome,
    Started,
    Switched,
    WaitingToJoin,
)
from pipollux_sched.store import Store
from tests.sched.store.stores import Clock, point, serve_nodes

JOB = "elastic"
GROWS = "grows from 1 to 2 replicas"
MOVES = "moves to node-b"


def begin(store: Store, clock: Clock) -> Callable[..., None]:
    """Let a job train on one replica that can be resized; return what lets more happen to it.

    That takes a moment and the events that then happen.
    """
    clock.now = 1000.0
    serve_nodes(store, **{"node-a": 2, "node-b": 2})
    nodes = {name: {"slots": 2, "kind": "cpu"} for name in ("node-a", "node-b")}
    store.add_event("cluster", {"nodes": nodes, "policy": "ExactPolicy"})
    spec = {"name": JOB, "script": "train.py", "num_stages": 1, "max_replicas": 4}
    store.submit(JOB, spec, "token", 3)

    def at(moment: float, *events: Event) -> None:
        clock.now = moment
        for event in events:
            store.transition(JOB, event)

    at(1001.0, Allocate(["node-a"], "starts on 1 replica on node-a"), Started(1, ("4711",)))
    at(1005.0, FirstStep(1, 1), ElasticReady(1))
    return at


def report_steps(store: Store, attempt: int, first: int, last: int, replicas: int) -> None:
    """Report a point for each of these steps; step `n` is done at the moment 1000 + `n`."""
    points = [
        replace(point(step), loss=100.0 / step, num_replicas=replicas)
        for step in range(first, last + 1)
    ]
    store.add_report(JOB, attempt, points)


def elastic_run(store: Store, clock: Clock) -> None:
    """Let a job grow, try in vain to grow, lose its first replica, restart, and complete.

    Membership 2 (replicas 0 and 1) trains from 1030, membership 4 (replica 1) from 1060,
    attempt 2 from 1090 to 1120.
    """
    at = begin(store, clock)
    report_steps(store, 1, 5, 29, 1)
    at(1020.0, Allocate(["node-a", "node-b"], GROWS))
    at(1028.0, WaitingToJoin(1, (1,)))
    at(1030.0, Switched(1, 2, step=29, seconds=0.25))
    report_steps(store, 1, 30, 59, 2)
    at(1035.0, Allocate(["node-a", "node-b", "node-b"], "grows from 2 to 3 replicas"))
    at(1038.0, WaitingToJoin(1, (2,)), ChangeRefused(1, 3, "a port is taken"))
    at(1055.0, Allocate(["node-b"], MOVES))
    at(1060.0, Switched(1, 4, step=59, seconds=0.05))
    report_steps(store, 1, 60, 79, 1)
    at(1080.0, Allocate(["node-a"], "moves to node-a"))
    at(1082.0, Exited(1, Outcome.STOPPED, step=79), Started(2, ("4712",)))
    at(1090.0, FirstStep(2, 80, restart_seconds=10.0))
    report_steps(store, 2, 91, 119, 1)
    at(1120.0, Exited(2, Outcome.COMPLETE, step=119, epoch=3))
