"""Heartbeats in the store: what the next scheduler learns of them, in each kind of database."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipollux_sched.lifecycle import Allocate, Exited, Outcome, Recover
from pipollux_sched.store import ReceivedHeartbeat, StaleAttemptError, Store
from tests.sched.store.stores import Clock


def run(store: Store, *nodes: str, name: str = "toy") -> None:
    store.submit(name, {"name": name}, "token", max_restarts=1)
    store.transition(name, Allocate(nodes, "free"))


def test_the_next_scheduler_learns_who_was_heard(
    store: Store, place: Path | str, clock: Clock
) -> None:
    run(store, "a", "b", "c")
    version = store.version
    store.heartbeats.keep([])
    assert store.version == version, "nothing is written where there is nothing to write"
    store.heartbeats.keep(
        [
            ReceivedHeartbeat("toy", 1, 1),
            ReceivedHeartbeat("toy", 1, 0, 7, seconds=2.0),
            ReceivedHeartbeat("gone", 1, 0),
            ReceivedHeartbeat("toy", 2, 2),
        ]
    )
    assert store.version == version + 1
    clock.now += 10.0
    with Store(place, clock=clock) as other:
        assert other.heartbeats.of("toy", 1) == {0: (12.0, 7, False), 1: (10.0, None, False)}
        assert other.heartbeats.of("toy", 2) == other.heartbeats.of("gone", 1) == {}
    store.heartbeats.keep([ReceivedHeartbeat("toy", 1, 1, 9)])
    assert store.heartbeats.of("toy", 1)[1] == (0.0, 9, False)


def test_who_has_finished_stays_so(store: Store) -> None:
    run(store, "a")
    store.heartbeats.keep([ReceivedHeartbeat("toy", 1, 0, 7, finished=True)])
    store.heartbeats.keep([ReceivedHeartbeat("toy", 1, 0, 7)])
    assert store.heartbeats.of("toy", 1) == {0: (0.0, 7, True)}


@pytest.mark.parametrize(
    "end", [Exited(1, Outcome.FAILED, message="it fell over"), Exited(1, Outcome.COMPLETE)]
)
def test_heartbeats_of_a_attempt_that_has_ended_are_gone(store: Store, end: Exited) -> None:
    run(store, "a")
    run(store, "b", name="other")
    beats = [ReceivedHeartbeat("toy", 1, 0), ReceivedHeartbeat("other", 1, 0)]
    store.heartbeats.keep(beats)
    store.transition("toy", end)
    assert store.heartbeats.of("toy", 1) == {}
    store.heartbeats.keep(beats)  # one of them came too late
    assert store.heartbeats.of("toy", 1) == {}
    assert store.heartbeats.of("other", 1).keys() == {0}
    store.transition("other", Recover())
    assert store.heartbeats.of("other", 1) == {}


def test_a_job_is_deleted_with_its_heartbeats(store: Store) -> None:
    run(store, "a")
    store.transition("toy", Exited(1, Outcome.COMPLETE))
    store.deletions.begin("toy")
    assert store.heartbeats.of("toy", 1) == {}


def test_what_a_backend_needs_to_adopt_a_attempt(store: Store, place: Path | str) -> None:
    run(store, "a")
    assert store.launches.launch("toy", 1) is None
    store.launches.note_launch("toy", 1, {"steps": ["17.0", "17.1"]})
    store.launches.note_launch("toy", 1, {"steps": ["17.3"], "port": 29500})
    with Store(place) as other:
        assert other.launches.launch("toy", 1) == {"steps": ["17.3"], "port": 29500}
        assert other.launches.launch("toy", 2) is other.launches.launch("gone", 1) is None
    with pytest.raises(StaleAttemptError, match="job 'toy' has no attempt 2"):
        store.launches.note_launch("toy", 2, {})


def test_where_the_replicas_have_saved_is_told_by_the_present_attempt(store: Store) -> None:
    run(store, "a")
    assert store.launches.stopped_step("toy", 1) is None
    store.launches.note_stop("toy", 1, 0)
    assert store.launches.stopped_step("toy", 1) == 0
    for attempt in (1, 2):
        store.transition("toy", Exited(1, Outcome.COMPLETE))
        with pytest.raises(StaleAttemptError):
            store.launches.note_stop("toy", attempt, 7)
    assert store.launches.stopped_step("toy", 1) == 0
