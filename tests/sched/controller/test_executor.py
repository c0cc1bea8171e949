"""Ends of jobs that come together, with a store that is real."""

from __future__ import annotations

from collections import deque

import pytest

from pipollux_sched.backend import Report
from pipollux_sched.controller.executor import Executor
from pipollux_sched.lifecycle import Allocate, Event, Exited, NewcomerLost, Outcome, Phase, Started
from pipollux_sched.store import ReceivedReport, Store, Submission
from tests.sched.store.stores import point
from tests.sched.supervised import POINT

NAMES = ("a", "b", "c")


class Ended:
    """In the backend's place: says what a test wants to have happened."""

    def __init__(self) -> None:
        self.happened: deque[Report] = deque()
        self.forgotten: list[tuple[str, int]] = []

    def poll(self) -> list[Report]:
        found = [*self.happened]
        self.happened.clear()
        return found

    def forget(self, job: str, generation: int) -> None:
        self.forgotten.append((job, generation))

    def say(self, job: str, event: Event, unsent: dict[str, object] | None = None) -> None:
        self.happened.append(Report(job, event, unsent))


@pytest.fixture(autouse=True)
def running(store: Store) -> None:
    """Three jobs that run, of which two have reported a step."""
    store.submit_all([Submission(name, {}, "", 0) for name in NAMES])
    store.transition_all([(name, Allocate(["n"], "free")) for name in NAMES])
    store.transition_all([(name, Started(1, ("pid",))) for name in NAMES])
    store.add_all_reports([ReceivedReport(n, 1, [point(i)]) for i, n in enumerate("ab", 5)])


def make(store: Store, backend: Ended, freed: list[int] | None = None) -> Executor:
    on_ended = (lambda: None) if freed is None else (lambda: freed.append(1))
    return Executor(store, backend, None, grace=1.0, on_ended=on_ended)  # type: ignore[arg-type]  # it starts nothing


def test_ends_that_come_together_have_each_its_own_progress(store: Store) -> None:
    backend, freed = Ended(), list[int]()
    executor = make(store, backend, freed)
    for name in NAMES:
        backend.say(name, Exited(1, Outcome.COMPLETE))
    before = store.version
    executor.step()
    assert store.version == before + 1, "one transaction"
    assert backend.forgotten == [(name, 1) for name in NAMES]
    assert freed == [1]
    ends = [store.events(job=name)[-1] for name in NAMES]
    assert [event["type"] for event in ends] == ["complete"] * 3
    assert [event["step"] for event in ends] == [5, 6, None]


def test_a_job_that_is_gone_keeps_nobody_from_ending(store: Store) -> None:
    backend = Ended()
    backend.say("deleted", NewcomerLost(1, 1, "its node is gone"))
    for name in ("a", "deleted", "c"):
        backend.say(name, Exited(1, Outcome.COMPLETE), {"generation": 1, "points": [POINT]})
    make(store, backend).step()
    assert store.events(job="a")[-1]["step"] == 7
    assert [store.job(name).phase for name in "abc"] == [
        *(Phase.COMPLETE, Phase.RUNNING, Phase.COMPLETE)
    ]
    assert backend.forgotten == [("a", 1), ("deleted", 1), ("c", 1)]


def test_what_the_store_did_not_take_is_taken_later(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Ended()
    executor = make(store, backend)
    for name in NAMES:
        backend.say(name, Exited(1, Outcome.COMPLETE))
    with monkeypatch.context() as patched:
        patched.setattr(Store, "transition_all", full)
        with pytest.raises(OSError, match="disk"):
            executor.step()
    assert backend.forgotten == []
    executor.step()
    assert {store.job(name).phase for name in NAMES} == {Phase.COMPLETE}
    assert len(backend.forgotten) == len(NAMES)


def full(*_: object) -> None:
    raise OSError("the disk is full")
