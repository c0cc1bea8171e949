"""How many jobs were unfinished over a job's life, from a store alone."""

from __future__ import annotations

import pytest

from pipollux_policies import ExactPolicy, make_policy
from pipollux_policies.exact.fair_share import EqualShare, FairStanding
from pipollux_sched.allocator.snapshot import SnapshotReader
from pipollux_sched.lifecycle import Allocate, Exited, Outcome, Started
from pipollux_sched.planning.explain import spell_standing
from pipollux_sched.store import Store
from tests.sched.store.stores import Clock, on_each_database


@on_each_database
def test_a_scheduler_that_is_started_again_goes_on_with_it(store: Store, clock: Clock) -> None:
    store.submit("a", {"name": "a", "script": "x"}, "token", 3)
    store.submit("b", {"name": "b", "script": "x"}, "token", 3)
    attempt = store.transition("b", Allocate(["n"], "free")).job.state.attempt
    store.transition("b", Started(attempt, ("1",)))
    clock.now += 100.0
    store.transition("b", Exited(attempt, Outcome.COMPLETE))
    clock.now += 300.0
    for _ in range(2):  # a reader of its own each time
        reader = SnapshotReader(store, restart_seconds=30.0, clock=lambda: clock.now)
        (job,) = reader.read().candidates
        assert job.info.mean_jobs == pytest.approx(1.25)


def test_a_standing_in_words() -> None:
    share = EqualShare(3.5, 4, 4.0)
    stands = FairStanding(share, 1000.0, 1210.0, 0.0, -20.0, 1.25, 90.0, 500.0, True)
    assert spell_standing(stands) == (
        "It gets its equal share of 4 slots first: with it from now on it ends 1.21 times as late "
        "as on it alone, of 1.25 times that are promised."
    )
    policy = make_policy(fairness=1.25)
    assert isinstance(policy, ExactPolicy)
    assert policy.options == {"fairness": 1.25}
