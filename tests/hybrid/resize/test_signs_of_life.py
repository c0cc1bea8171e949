"""Which processes are taken for frozen, by a clock that the test turns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipollux_hybrid.job.env import JobEnvironment
from pipollux_hybrid.resize.rendezvous_folder import RendezvousFolder
from pipollux_hybrid.resize.scheduler_rendezvous import SchedulerRendezvous
from pipollux_hybrid.resize.signs_of_life import SignsOfLife


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def look(seen: SignsOfLife, clock: Clock, seconds: int, **signs: object) -> dict[str, float]:
    """Look each second for a while; return what was found last."""
    found: dict[str, float] = {}
    for _ in range(seconds):
        clock.now += 1.0
        assert seen.is_due()
        found = seen.look(signs)
    return found


def test_one_that_leaves_no_new_sign() -> None:
    clock = Clock()
    seen = SignsOfLife(12.0, clock)
    assert look(seen, clock, 13, a=1, b=1) == {}
    assert look(seen, clock, 1, a=1, b=2) == {"a": 13.0}
    assert look(seen, clock, 12, a=2, b=2) == {}
    assert look(seen, clock, 1, a=2, b=2) == {"b": 13.0}
    assert look(seen, clock, 1, a=2) == {"a": 13.0}, "b is left out by now"
    assert look(seen, clock, 1, b=2) == {}, "what was known of it is forgotten"


def test_one_that_has_never_left_a_sign_is_not_judged() -> None:
    clock = Clock()
    assert look(SignsOfLife(12.0, clock), clock, 100, a=None) == {}


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """A replica that was frozen itself, or a folder that did not answer, condemns nobody."""
    clock = Clock()
    seen = SignsOfLife(12.0, clock)
    look(seen, clock, 2, a=1)
    clock.now += 1000.0
    assert look(seen, clock, 10, a=1) == {}
    assert look(seen, clock, 1, a=1) == {"a": 13.0}


def test_it_looks_twelve_times_within_the_limit_and_never_without_one() -> None:
    clock = Clock()
    seen = SignsOfLife(60.0, clock)
    assert seen.is_due()
    seen.look({})
    clock.now += 4.9
    assert not seen.is_due()
    clock.now += 0.2
    assert seen.is_due()
    assert not SignsOfLife(0.0, clock).is_due()


def test_signs_in_a_folder(tmp_path: Path) -> None:
    mine, theirs = RendezvousFolder(tmp_path), RendezvousFolder(tmp_path)
    theirs.leave_sign("b")
    first = mine.signs(["b", "c"])
    theirs.leave_sign("b")
    assert first["c"] is None
    assert mine.signs(["b"])["b"] not in (None, first["b"])
    theirs.withdraw("b")
    assert mine.signs(["b"]) == {"b": None}
    assert list(tmp_path.iterdir()) == []


def test_signs_among_the_processes_of_a_replica_under_a_scheduler(tmp_path: Path) -> None:
    """Of other replicas nothing is known: the scheduler hears their heartbeats."""
    env = JobEnvironment.read({"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path), "PIPOLLUX_REPLICA": "7"})
    stages = (replace(env, stage=stage, processes_per_replica=2) for stage in (0, 1))
    first, second = map(SchedulerRendezvous, stages)
    assert first.signs(["7-1", "8"]) == {"7-1": None, "8": None}
    second.leave_sign("7-1")
    before = first.signs(["7-1"])
    second.leave_sign("7-1")
    assert first.signs(["7-1"])["7-1"] not in (None, before["7-1"])
    SchedulerRendezvous(replace(env, replica=8, processes_per_replica=2)).leave_sign("8")
    assert first.signs(["8"]) == {"8": None}


def test_a_replica_of_one_process_leaves_its_signs_to_heartbeats(tmp_path: Path) -> None:
    env = JobEnvironment.read({"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path), "PIPOLLUX_REPLICA": "7"})
    meeting = SchedulerRendezvous(env)
    meeting.leave_sign("7")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
