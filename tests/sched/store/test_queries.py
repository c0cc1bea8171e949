"""Figures over many jobs and curves of one, in each kind of database."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from pipollux_sched.lifecycle import Allocate, Cancel, Exited, Outcome, Started
from pipollux_sched.store import AttemptCounts, NoisePoint, Store
from tests.extent import turns
from tests.sched.resize_events import JOB, elastic_run
from tests.sched.store.stores import DATABASES, Clock, point


def start(store: Store, name: str, node: str = "a") -> int:
    attempt = store.transition(name, Allocate([node], "free")).job.state.attempt
    store.transition(name, Started(attempt, ("1",)))
    return attempt


def test_attempts_and_phases(store: Store, clock: Clock) -> None:
    for name in ("moved", "broken", "cancelled", "waits"):
        store.submit(name, {"name": name}, "token", 3)
    store.add_report("moved", start(store, "moved"), [point(1)])
    start(store, "broken")
    start(store, "cancelled")
    clock.now = 1010.0
    store.transition("moved", Allocate(["b"], "it is better"))
    store.transition("moved", Exited(1, Outcome.STOPPED, step=1))
    store.transition("broken", Exited(1, Outcome.FAILED, message="boom"))
    store.transition("cancelled", Cancel())
    store.transition("cancelled", Exited(1, Outcome.FAILED, message="it was killed"))
    overview = store.overview
    assert overview.attempt_counts() == AttemptCounts(
        restarts=1, reallocations=1, failures=1, resizes=0
    )
    phases = overview.jobs_by_phase()
    assert sum(phases.values()) == 4
    assert (phases["Created"], phases["Failed"]) == (1, 1)
    assert len(overview.attempts_since(0.0, 10)) == 4
    since = [(each.job, each.attempt, n) for each, n in overview.attempts_since(1010.0, 10)]
    assert since == [("moved", 2, 1)]
    assert [each.attempt for each, _ in overview.attempts_since(0.0, 1)] == [2], "the newest"


def test_resizes_are_no_restarts(store: Store, clock: Clock) -> None:
    """They are counted by themselves, also those of a job that is deleted later."""
    elastic_run(store, clock)
    counts = AttemptCounts(restarts=1, reallocations=1, failures=0, resizes=2)
    assert store.overview.attempt_counts() == counts
    shown = [(one.attempt, one.membership) for one, _ in store.overview.attempts_since(0, 10)]
    assert sorted(shown) == [(1, 1), (1, 2), (1, 4), (2, 1)]
    store.deletions.begin(JOB)
    assert store.overview.attempt_counts() == counts


def test_the_goodput_told_last(store: Store) -> None:
    for name in ("runs", "silent", "waits"):
        store.submit(name, {"name": name}, "token", 3)
    for name in ("runs", "silent"):
        start(store, name)
    points = [replace(point(step), goodput=10.0 * step) for step in (1, 2, 3)]
    store.add_report("runs", 1, points)
    store.add_report("silent", 1, [replace(point(1), goodput=None)])
    assert store.overview.goodputs() == {"runs": 30.0}


@pytest.mark.parametrize(("place", "total"), turns(DATABASES, [0, 1, 2, 7, 30]), indirect=["place"])
def test_curves_are_thinned_evenly(store: Store, total: int) -> None:
    """Both ends are kept, and no gap is more than one longer than another."""
    for name in ("other", "toy"):
        store.submit(name, {"name": name}, "token", 3)
        start(store, name)
        store.add_report(name, 1, [point(step) for step in range(total)])
    for most in (0, 1, 2, 3, 7, 29, 30, 1000):
        kept = [each.step for each in store.overview.points("toy", most)]
        assert len(kept) == min(total, most)
        assert kept == sorted(set(kept))
        if kept:
            assert kept[-1] == total - 1
        if len(kept) > 1:
            assert kept[0] == 0
            gaps = {after - before for before, after in itertools.pairwise(kept)}
            assert max(gaps) - min(gaps) <= 1


def test_the_noise_of_the_gradient(store: Store, clock: Clock) -> None:
    store.submit("toy", {"name": "toy"}, "token", 3)
    start(store, "toy")
    gradient = {"gradParams": {"norm": 2.0, "var": 6.0}}
    told = [
        {"initBatchSize": 32, **gradient},
        {"initBatchSize": 32},
        {"initBatchSize": 32, "gradParams": {"norm": 0.0, "var": 6.0}},
        gradient,
    ]
    for hints in told:
        clock.now += 1.0
        store.put_hints("toy", 1, hints)
    assert store.overview.noise("toy", 10) == [
        NoisePoint(1001.0, 2.0, 6.0, 96.0),
        NoisePoint(1003.0, 0.0, 6.0, None),
        NoisePoint(1004.0, 2.0, 6.0, None),
    ]
    assert store.overview.noise("toy", 0) == []
