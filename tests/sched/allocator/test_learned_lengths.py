"""Lengths of completed jobs in a store, and what they tell of jobs that run."""

from __future__ import annotations

from typing import Any

import pytest

from pipollux_perfmodel import SchedHints, SpeedupFunction
from pipollux_policies import LengthHistory
from pipollux_sched.allocator.job_infos import job_info
from pipollux_sched.allocator.learned_lengths import LearnedLengths
from pipollux_sched.allocator.snapshot import MOST_UNREPORTED, SnapshotReader
from pipollux_sched.lifecycle import Allocate, Exited, Outcome, Resume, Started, Suspend
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import Store
from tests.cli.kept import point
from tests.sched.store.stores import Clock, on_each_database

HINTS: dict[str, Any] = {
    "initBatchSize": 64,
    "localBszBounds": [64, 256],
    "maxBatchSize": 1024,
    "maxProfiledReplicas": 1,
    "gradParams": {"norm": 1.0, "var": 1.0},
    "perfParams": {
        "alpha_c": 0.1,
        "beta_c": 0.01,
        "alpha_n": 0.1,
        "beta_n": 0.01,
        "alpha_r": 0.1,
        "beta_r": 0.01,
        "gamma": 1.5,
    },
}


def run(store: Store, name: str, hints: dict[str, Any], *, end: bool = True) -> None:
    """Let a job run, report, and complete."""
    store.submit(name, {"name": name, "script": "x"}, "token", 3)
    attempt = store.transition(name, Allocate(["a"], "free")).job.state.attempt
    store.transition(name, Started(attempt, ("1",)))
    store.put_hints(name, attempt, {**HINTS, **hints})
    if end:
        store.transition(name, Exited(attempt, Outcome.COMPLETE))


def goodput() -> float:
    """Return the goodput of one replica of these jobs."""
    own = job_info(JobSpec(name="x", script="x"), SchedHints.from_json_object(HINTS), age=0.0)
    assert isinstance(own.speedup_fn, SpeedupFunction)
    return own.speedup_fn.base_goodput


def lengths(store: Store) -> dict[str, tuple[float, ...]]:
    """Return what is known of the jobs that run, as policies see it."""
    snapshot = SnapshotReader(store, restart_seconds=30.0).read()
    return {job.name: job.info.likely_work for job in snapshot.candidates}


@on_each_database
def test_what_a_family_trained_tells_how_long_the_next_one_trains(store: Store) -> None:
    run(store, "bert-9", {"trainedSamples": 100.0}, end=False)
    assert lengths(store) == {"bert-9": ()}, "nothing has completed"
    for number in range(10):
        run(store, f"bert-{number + 10}", {"trainedSamples": 1000.0})
    (left,) = lengths(store).values()
    assert left[7] == pytest.approx(900.0 / goodput())


def test_what_a_job_declares_counts_as_far_as_others_kept_to_it(store: Store, clock: Clock) -> None:
    told = {"trainedSamples": 200.0, "remainingSamples": 800.0}
    run(store, "a-1", told, end=False)
    assert lengths(store) == {"a-1": (pytest.approx(800.0 / goodput()),)}
    for number in range(10):
        run(store, f"a-{number + 2}", told)  # with its last hints: it stopped early
    left = lengths(store)["a-1"]
    assert left == (pytest.approx(800.0 / goodput()),) * len(left), "it has outlived all of them"
    run(store, "a-99", {"trainedSamples": 100.0, "remainingSamples": 900.0}, end=False)
    assert lengths(store)["a-99"][0] == pytest.approx(100.0 / goodput())

    # Whose last hints are old enough for the rest has trained it.
    run(store, "b-1", told, end=False)
    clock.now += 801.0 / goodput()
    store.transition("b-1", Exited(1, Outcome.COMPLETE))
    history = LearnedLengths(store).read()
    assert set(history.work_left("b", 0.0, 1.0, 500.0)) >= {500.0}
    assert max(history.work_left("a", 0.0, 1.0, 500.0)) == 500.0


def waiting(store: Store, name: str, **fields: Any) -> None:
    """Submit a job that is to wait: it has reported nothing."""
    store.submit(name, {"name": name, "script": "x", **fields}, "token", 3)


def test_one_that_waits_is_as_long_as_its_family_was(store: Store) -> None:
    for number in range(10):
        run(store, f"bert-{number}", {"trainedSamples": 1000.0})
    waiting(store, "bert-99")
    waiting(store, "gpt-1")
    left = lengths(store)
    assert left["bert-99"][7] == pytest.approx(1000.0 / goodput())
    assert left["gpt-1"] == (), "nothing is known of how fast it trains"


def test_one_that_waits_is_as_long_as_others_say_that_are_at_work(store: Store) -> None:
    waiting(store, "bert-99")
    run(store, "bert-1", {"trainedSamples": 100.0}, end=False)
    assert lengths(store)["bert-99"] == (), "the other does not say"
    run(store, "bert-2", {"trainedSamples": 100.0, "remainingSamples": 900.0}, end=False)
    left = lengths(store)
    assert left["bert-99"][7] == pytest.approx(1000.0 / goodput())
    assert left["bert-1"][7] == pytest.approx(900.0 / goodput()), "it has trained 100 of them"
    assert left["bert-2"] == (pytest.approx(900.0 / goodput()),), "its own word counts"
    waiting(store, "bert-long", hints={**HINTS, "remainingSamples": 5000.0})
    assert lengths(store)["bert-long"] == (pytest.approx(5000.0 / goodput()),)


@on_each_database
def test_what_a_job_has_trained_since_its_hints_counts(store: Store, clock: Clock) -> None:
    """One replica makes a second of work per second; a stopped job is where its hints say."""
    for name in ("runs", "stops", "starts"):
        run(store, name, {"remainingSamples": 7e4, "trainedSamples": 100.0}, end=False)
        if name != "starts":
            store.add_report(name, 1, [point(1, clock.now)])
    store.transition("stops", Suspend())
    store.transition("stops", Exited(1, Outcome.STOPPED, step=9, epoch=0))
    store.transition("stops", Resume())
    whole = 7e4 / goodput()
    for elapsed, trained in ((20.0, 20.0), (980.0, MOST_UNREPORTED)):
        clock.now += elapsed
        snapshot = SnapshotReader(store, restart_seconds=30.0, clock=clock).read()
        left = {job.name: job.info.likely_work for job in snapshot.candidates}
        assert left["runs"] == pytest.approx((whole - trained,))
        assert left["stops"] == left["starts"] == pytest.approx((whole,))
    for told, left in ((1000.0, 10.0), (100.0, 1.0), (0.0, 1.0)):
        store.put_hints("runs", 1, {**HINTS, "remainingSamples": told, "trainedSamples": 7e4})
        clock.now += 100.0
        snapshot = SnapshotReader(store, restart_seconds=30.0, clock=clock).read()
        found = next(job.info.likely_work for job in snapshot.candidates if job.name == "runs")
        assert found == pytest.approx((left / goodput(),)), "it has not ended"


def test_each_job_is_read_once(store: Store, clock: Clock) -> None:
    learned = LearnedLengths(store)
    for number in range(3):
        run(store, f"a-{number}", {"trainedSamples": 10.0})
        assert len(learned.read()) == number + 1
        assert len(learned.read()) == number + 1
        clock.now += number  # the first two end at the same time
    assert len(LearnedLengths(store).read()) == 3


@pytest.mark.parametrize(
    "hints", [{}, {"trainedSamples": 0.0}, {"trainedSamples": 5.0, "perfParams": None}]
)
def test_who_says_nothing_teaches_nothing(store: Store, hints: dict[str, Any]) -> None:
    run(store, "a-1", hints)
    assert len(LearnedLengths(store).read()) == 0


def test_those_that_fail_teach_nothing(store: Store) -> None:
    run(store, "a-1", {"trainedSamples": 10.0}, end=False)
    store.transition("a-1", Exited(1, Outcome.FAILED, message="boom"))
    assert len(LearnedLengths(store).read()) == 0


def test_a_job_that_was_never_measured_is_not_judged() -> None:
    history = LengthHistory()
    assert job_info(JobSpec(name="a", script="x"), None, age=0.0, history=history).work_left == ()
