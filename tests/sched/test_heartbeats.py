"""When replicas were last heard of, by a clock that the test turns."""

from __future__ import annotations

import threading

from pipollux_sched.heartbeats import Heard, Heartbeats


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_replica_that_falls_silent() -> None:
    clock = Clock()
    beats = Heartbeats(clock)
    assert beats.silent(0.0) == []
    beats.note("a", 1, 0)
    beats.note("a", 1, 1, step=5)
    beats.note("b", 4, 0)
    clock.now += 20.0
    beats.note("a", 1, 0, step=9)
    clock.now += 15.0
    assert beats.silent(30.0) == [("a", 1, 1, 35.0), ("b", 4, 0, 35.0)]
    assert beats.silent(35.0) == []
    assert beats.heard("a", 1) == {0: Heard(15.0, 9), 1: Heard(35.0, 5)}
    assert beats.heard("a", 2) == beats.heard("c", 1) == {}


def test_a_newer_generation_replaces_the_older() -> None:
    clock = Clock()
    beats = Heartbeats(clock)
    assert beats.note("a", 1, 0)
    assert beats.note("a", 1, 1)
    assert not beats.note("a", 1, 1), "it was heard of before"
    clock.now += 60.0
    assert beats.note("a", 2, 0)
    assert beats.silent(30.0) == []
    clock.now += 60.0
    assert not beats.note("a", 1, 1), "one of the old generation that is late"
    assert beats.silent(30.0) == [("a", 2, 0, 60.0)]


def test_a_job_that_is_forgotten_is_missed_no_more() -> None:
    clock = Clock()
    beats = Heartbeats(clock)
    beats.note("a", 1, 0)
    beats.note("b", 1, 0)
    beats.forget("a", 1)
    beats.forget("b", 0)  # a generation that is over already
    beats.forget("never-heard-of", 1)
    clock.now += 60.0
    assert [entry.job for entry in beats.silent(30.0)] == ["b"]


def test_many_threads_at_once() -> None:
    clock = Clock()
    beats = Heartbeats(clock)
    together = threading.Barrier(8)

    def beat(replica: int) -> None:
        together.wait(10)
        for step in range(200):
            beats.note("a", 1 + step // 100, replica, step)
            beats.silent(1.0)

    threads = [threading.Thread(target=beat, args=(replica,)) for replica in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert beats.heard("a", 2) == {replica: Heard(0.0, 199) for replica in range(8)}
