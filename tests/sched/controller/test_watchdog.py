"""Deadlines and silence: what is let happen, once each."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipollux_sched.controller import watchdog
from pipollux_sched.controller.heartbeats import Heartbeats
from pipollux_sched.controller.watchdog import Watchdog
from pipollux_sched.lifecycle import (
    Allocate,
    Event,
    Expire,
    FirstStep,
    HeartbeatLost,
    Phase,
    Stalled,
    Started,
    StartOverdue,
)
from pipollux_sched.store import Store


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Case:
    """A watchdog over one store, and what it lets happen."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store, self.clock = store, clock
        self.happened: list[tuple[str, Event]] = []
        self.heartbeats = Heartbeats(clock)
        self.dog = Watchdog(
            store, self.heartbeats, self.handle, ending=threading.Event(), heartbeat_timeout=30.0
        )

    def handle(self, name: str, event: Event) -> None:
        self.happened.append((name, event))
        self.store.transition(name, event)

    def submit(self, name: str, deadline: float | None = None, **fields: Any) -> None:
        self.store.submit(name, {"name": name, **fields}, "token", 3, deadline)

    def look(self) -> list[tuple[str, Event]]:
        self.happened.clear()
        self.dog.look()
        return list(self.happened)


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    clock = Clock()
    with Store(tmp_path / "pipollux.db", create=True, clock=clock) as store:
        yield Case(store, clock)


def test_deadlines(case: Case) -> None:
    case.submit("soon", 10.0)
    case.submit("later", 20.0)
    case.submit("never")
    case.store.transition("later", Allocate(["a"], "free"))
    case.clock.now += 9.9
    assert case.look() == []
    case.clock.now += 0.1
    [(name, event)] = case.look()
    assert name == "soon"
    assert isinstance(event, Expire)
    assert case.store.job("soon").phase is Phase.FAILED
    assert "has passed" in case.store.job("soon").state.message
    case.clock.now += 60.0
    assert [name for name, _ in case.look()] == ["later"]
    assert case.store.job("later").phase is Phase.RUNNING, "it saves first"
    assert case.look() == [], "it was told"


def test_silence(case: Case) -> None:
    case.submit("toy")
    case.store.transition("toy", Allocate(["a", "b"], "free"))
    case.clock.now += 1000.0
    assert case.look() == [], "who never said anything is not silent"
    case.heartbeats.note("toy", 1, 0)
    case.heartbeats.note("toy", 1, 1)
    case.clock.now += 29.0
    case.heartbeats.note("toy", 1, 0)
    assert case.look() == []
    case.clock.now += 2.0
    why = "Replica 1 sent no heartbeat for 31 s, so all were ended."
    assert case.look() == [("toy", HeartbeatLost(1, why))]
    assert case.store.job("toy").state.reason == "HeartbeatLost"
    assert case.look() == [], "once is enough"
    case.heartbeats.note("gone", 1, 0)
    case.clock.now += 61.0
    case.dog = Watchdog(
        case.store, case.heartbeats, case.store.transition, ending=threading.Event()
    )
    case.dog.look()
    assert case.heartbeats.lost(0.0) == [], "a job that is gone is forgotten"


def test_a_training_loop_that_hangs(case: Case) -> None:
    case.submit("toy")
    case.store.transition("toy", Allocate(["a"], "free"))
    case.store.transition("toy", FirstStep(1, 7))
    for _ in range(3):
        case.heartbeats.note("toy", 1, 0, 7, hang_timeout=60.0)
        assert case.look() == []
        case.clock.now += 20.0
    case.heartbeats.note("toy", 1, 0, 7, hang_timeout=60.0)
    why = "Its step has been 7 for 60 s although its replicas send heartbeats, so all were ended."
    assert case.look() == [("toy", Stalled(1, why))]
    state = case.store.job("toy").state
    assert (state.phase, state.reason, state.message) == (Phase.RUNNING, "Stalled", why)
    assert case.look() == [], "once is enough"


def test_a_script_that_never_reports(case: Case) -> None:
    """The time runs from the start of its processes, and ends with the first step."""
    case.submit("silent", start_timeout=60.0)
    case.submit("patient", start_timeout=None)
    case.submit("usual")
    case.submit("trains", start_timeout=60.0)
    for name in ("silent", "patient", "usual", "trains"):
        case.store.transition(name, Allocate(["a"], "free"))
    case.clock.now += 1000.0
    assert case.look() == [], "the processes do not run yet"
    for name in ("silent", "patient", "usual", "trains"):
        case.store.transition(name, Started(1, ("1",)))
    case.store.transition("trains", FirstStep(1, 7))
    case.clock.now += 59.0
    assert case.look() == []
    case.clock.now += 1.0
    [(name, event)] = case.look()
    assert name == "silent"
    assert isinstance(event, StartOverdue)
    state = case.store.job("silent").state
    assert state.reason == "StartTimeout"
    assert state.message.startswith("It ran for 60 s (start_timeout) and reported no optimizer ")
    assert case.look() == [], "once is enough"
    case.clock.now += 3540.0
    assert [name for name, _ in case.look()] == ["usual"]


def test_a_replica_that_has_nothing_left_to_do_is_not_silent(case: Case) -> None:
    """Once the one that writes the last checkpoint was killed whenever that took long."""
    case.submit("toy")
    case.store.transition("toy", Allocate(["a", "b"], "free"))
    case.heartbeats.note("toy", 1, 0)
    case.heartbeats.note("toy", 1, 1, finished=True)
    for _ in range(4):
        case.clock.now += 20.0
        case.heartbeats.note("toy", 1, 0)
        assert case.look() == []
    case.clock.now += 31.0
    assert case.look() == [
        ("toy", HeartbeatLost(1, "Replica 0 sent no heartbeat for 31 s, so all were ended."))
    ]


def test_processes_that_do_not_end_though_their_scripts_have(case: Case) -> None:
    case.submit("toy")
    case.store.transition("toy", Allocate(["a", "b"], "free"))
    case.heartbeats.note("toy", 1, 0, 9, finished=True)
    case.heartbeats.note("toy", 1, 1)
    case.clock.now += 29.0
    case.heartbeats.note("toy", 1, 1, 9, finished=True)
    case.clock.now += 60.0
    assert case.look() == []
    case.clock.now += 1.0
    [(name, event)] = case.look()
    assert name == "toy"
    assert isinstance(event, HeartbeatLost)
    assert event.why.startswith("The scripts of all replicas have ended")
    assert case.look() == []


def test_what_was_heard_is_stored_now_and_then(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_INTERVAL", 0.01)
    monkeypatch.setattr(watchdog, "TIDY_INTERVAL", 0.01)
    case.submit("toy")
    case.store.transition("toy", Allocate(["a", "b"], "free"))
    ending = threading.Event()
    dog = Watchdog(case.store, case.heartbeats, case.handle, ending=ending)
    thread = threading.Thread(target=dog.run)
    thread.start()
    try:
        for step in (7, 8):
            case.heartbeats.note("toy", 1, 1, step)
            deadline = time.monotonic() + 240
            while case.store.heartbeats.of("toy", 1) != {1: (0.0, step, False)}:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    finally:
        ending.set()
        thread.join(240)


def test_silence_that_could_not_be_written_down_is_not_forgotten(case: Case) -> None:
    case.submit("toy")
    case.store.transition("toy", Allocate(["a"], "free"))
    case.heartbeats.note("toy", 1, 0)
    case.clock.now += 31.0

    def full(name: str, event: Event) -> None:
        raise OSError("no space left on device")

    dog = Watchdog(
        case.store, case.heartbeats, full, ending=threading.Event(), heartbeat_timeout=30.0
    )
    with pytest.raises(OSError, match="no space left"):
        dog.look()
    assert [name for name, _ in case.look()] == ["toy"]
