"""The time that the processes of jobs have run, against `max_run_time`."""

from __future__ import annotations

from pipollux_sched.lifecycle import Allocate, Exited, Outcome, Started
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import Store

from .stores import Clock


def submit(store: Store, name: str, **fields: object) -> None:
    spec = JobSpec.model_validate({"name": name, "script": "train.py", **fields})
    store.submit(name, spec.model_dump(mode="json"), "token", 0)


def start(store: Store, name: str) -> int:
    store.transition(name, Allocate(["node-a"], "it is free"))
    attempt = store.job(name).state.attempt
    store.transition(name, Started(attempt, ("1",)))
    return attempt


def test_the_running_time_of_all_attempts_counts(store: Store, clock: Clock) -> None:
    submit(store, "toy", max_run_time="100s")
    submit(store, "free")
    clock.now += 1000  # in the queue
    start(store, "free")
    attempt = start(store, "toy")
    clock.now += 60
    store.transition("toy", Allocate([], "another one is first"))
    store.transition("toy", Exited(attempt, Outcome.STOPPED, step=3))
    clock.now += 1000  # in the queue again
    attempt = start(store, "toy")
    clock.now += 39
    assert store.over_run_time() == []
    clock.now += 2
    (over,) = store.over_run_time()
    assert (over.name, over.limit, round(over.used)) == ("toy", 100.0, 101)
    store.transition("toy", Exited(attempt, Outcome.FAILED, message="no"))
    assert store.over_run_time() == []
    clock.now += 1
    submit(store, "toy", max_run_time="100s")  # which begins anew
    start(store, "toy")
    clock.now += 99
    assert store.over_run_time() == []
    clock.now += 2
    assert [over.name for over in store.over_run_time()] == ["toy"]
