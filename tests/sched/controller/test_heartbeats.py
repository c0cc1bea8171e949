"""When replicas were last heard of, by a clock that the test turns."""

from __future__ import annotations

import threading

import pytest

from pipollux_sched.controller.heartbeats import Heartbeats
from pipollux_sched.store import KeptHeartbeat


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_replica_that_falls_silent() -> None:
    clock = Clock()
    beats = Heartbeats(clock)
    assert beats.lost(0.0) == []
    beats.note("a", 1, 0)
    beats.note("a", 1, 1, step=5)
    beats.note("b", 4, 0)
    clock.now += 20.0
    beats.note("a", 1, 0, step=9)
    clock.now += 15.0
    assert beats.lost(30.0) == [("a", 1, 1, 35.0), ("b", 4, 0, 35.0)]
    assert beats.lost(35.0) == []
    assert beats.heard("a", 1) == {0: KeptHeartbeat(15.0, 9), 1: KeptHeartbeat(35.0, 5)}
    assert beats.heard("a", 2) == beats.heard("c", 1) == {}


def test_a_newer_attempt_replaces_the_older() -> None:
    clock = Clock()
    beats = Heartbeats(clock)
    assert beats.note("a", 1, 0)
    assert beats.note("a", 1, 1)
    assert not beats.note("a", 1, 1), "it was heard of before"
    clock.now += 60.0
    assert beats.note("a", 2, 0)
    assert beats.lost(30.0) == []
    clock.now += 60.0
    assert not beats.note("a", 1, 1), "one of the old attempt that is late"
    assert beats.lost(30.0) == [("a", 2, 0, 60.0)]


def test_a_job_that_is_forgotten_is_missed_no_more() -> None:
    clock = Clock()
    beats = Heartbeats(clock)
    beats.note("a", 1, 0)
    beats.note("b", 1, 0)
    beats.forget("a", 1)
    beats.forget("b", 0)  # an attempt that is over already
    beats.forget("never-heard-of", 1)
    clock.now += 60.0
    assert [entry.job for entry in beats.lost(30.0)] == ["b"]


def test_an_attempt_of_which_no_replica_is_expected_any_more() -> None:
    """One after the other was let go, and those to come have not yet been heard of."""
    clock = Clock()
    beats = Heartbeats(clock)
    beats.note("a", 1, 0, 5, 30.0)
    beats.forget("a", 1, 0)
    clock.now += 60.0
    assert beats.lingering(30.0) == []
    assert beats.stalled() == []
    assert beats.lost(30.0) == []


BEATS = [
    # seconds, replica, step, hang_timeout of each beat; then step and seconds of what hangs
    ([(0, 0, 5, 30), (30, 0, 5, 30)], (5, 30)),
    ([(0, 0, 5, 30), (29, 0, 5, 30)], None),
    ([(0, 0, 5, 30), (29, 0, 6, 30), (58, 0, 6, 30)], None),
    ([(0, 0, 5, 30), (29, 0, 6, 30), (59, 0, 6, 30)], (6, 30)),
    ([(0, 0, 5, None), (99, 0, 5, None)], None),  # none is set, or nothing was trained yet
    ([(0, 0, 5, None), (99, 0, 5, 30), (128, 0, 5, 30)], None),  # counted from the first step
    ([(0, 0, 5, None), (99, 0, 5, 30), (129, 0, 5, 30)], (5, 30)),
    ([(0, 0, 5, 30), (40, 0, None, None), (80, 0, 5, 30)], None),
    ([(0, 0, None, 30), (99, 0, None, 30)], None),  # it never tells a step
    ([(0, 0, 5, 30), (99, 0, None, 30)], (5, 99)),
    ([(0, 0, 7, 30), (1, 1, 6, 30), (40, 1, 7, 30)], (7, 40)),  # who lags does not count as growth
    ([(0, 0, 7, 30), (20, 1, 8, 30), (40, 0, 7, 30)], None),  # the highest of any replica counts
    ([(0, 0, 7, 30), (50, 0, 3, 30)], (7, 50)),
]


@pytest.mark.parametrize(("told", "hangs"), BEATS)
def test_a_job_that_beats_and_does_not_step(
    told: list[tuple[float, int, int | None, float | None]], hangs: tuple[int, float] | None
) -> None:
    clock = Clock()
    beats = Heartbeats(clock)
    for seconds, replica, step, hang_timeout in told:
        clock.now = 100.0 + seconds
        beats.note("a", 2, replica, step, hang_timeout)
    beats.note("b", 1, 0, 5)
    clock.now += 1000.0  # who is not heard of may have gone on since
    assert beats.stalled() == ([] if hangs is None else [("a", 2, *hangs)])
    beats.note("a", 1, 0, 99, 30)  # late, of the attempt before
    assert beats.stalled() == ([] if hangs is None else [("a", 2, *hangs)])
    beats.note("a", 3, 0, 1, 30)
    assert beats.stalled() == []


def test_many_threads_at_once() -> None:
    clock = Clock()
    beats = Heartbeats(clock)
    together = threading.Barrier(8)

    def beat(replica: int) -> None:
        together.wait(240)
        for step in range(200):
            beats.note("a", 1 + step // 100, replica, step)
            beats.lost(1.0)

    threads = [threading.Thread(target=beat, args=(replica,)) for replica in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert beats.heard("a", 2) == {replica: KeptHeartbeat(0.0, 199) for replica in range(8)}


def test_what_an_earlier_scheduler_heard_is_expected() -> None:
    clock = Clock()
    beats = Heartbeats(clock)
    beats.note("a", 2, 0, 9)
    clock.now += 5.0
    kept = KeptHeartbeat(70.0, 3, finished=False)
    beats.expect("a", 2, 0, kept)  # it was heard of again before the store was read
    beats.expect("a", 2, 1, kept)
    beats.expect("a", 2, 2, kept._replace(finished=True))
    beats.expect("a", 1, 3, kept)
    heard = {
        0: KeptHeartbeat(5.0, 9),
        1: KeptHeartbeat(0.0, 3),
        2: KeptHeartbeat(0.0, 3, finished=True),
    }
    assert beats.heard("a", 2) == heard
    clock.now += 30.0
    assert beats.lost(30.0) == [("a", 2, 0, 35.0)]
    assert beats.lost(29.0) == [("a", 2, 0, 35.0), ("a", 2, 1, 30.0)]


def test_what_the_store_has_yet_to_be_told() -> None:
    clock = Clock()
    beats = Heartbeats(clock)
    for step in (7, 8):
        beats.note("a", 2, 1, step)
    beats.note("a", 2, 0)
    beats.note("a", 2, 2, 9, finished=True)
    beats.note("a", 2, 2, 8)  # late
    beats.expect("a", 2, 3, KeptHeartbeat(70.0, 5, finished=False))  # the store has it already
    clock.now += 2.0
    assert beats.take_changed() == [
        ("a", 2, 0, None, False, 2.0),
        ("a", 2, 1, 8, False, 2.0),
        ("a", 2, 2, 8, True, 2.0),
    ]
    assert beats.take_changed() == []
    beats.note("a", 2, 1, 9)
    beats.note("a", 3, 0)
    assert beats.take_changed() == [("a", 3, 0, None, False, 0.0)]
