"""Ends of jobs that come together, with a store that is real."""

from __future__ import annotations

from collections import deque

import pytest

from pipollux_sched.backend import Report
from pipollux_sched.controller.executor import Executor
from pipollux_sched.lifecycle import (
    Allocate,
    Event,
    Exited,
    JoiningReplicaLost,
    NodeLost,
    Outcome,
    Phase,
    Started,
)
from pipollux_sched.report.event_text import event_text
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

    def forget(self, job: str, attempt: int) -> None:
        self.forgotten.append((job, attempt))

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


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (Exited(1, Outcome.STOPPED, 3), "stopped and saved at step 3"),
        (Exited(1, Outcome.STOPPED), "stopped without saving"),
        (
            Exited(1, Outcome.STOPPED, checkpoint=2),
            "stopped without saving; its newest checkpoint is of step 2",
        ),
    ],
)
def test_the_step_of_a_stop_is_one_that_was_saved(store: Store, ended: Exited, said: str) -> None:
    """Not the last one that the job has reported."""
    backend = Ended()
    backend.say("a", ended)
    make(store, backend).step()
    (stopped,) = store.events(job="a", types=["stopped"])
    assert event_text(stopped) == said


@pytest.mark.parametrize("step", [3, None])
def test_what_was_killed_after_it_had_saved_has_saved(store: Store, step: int | None) -> None:
    """As where its node was lost, so that it was to be set aside."""
    store.transition("a", NodeLost(1, "Node n is gone.", "n"))
    backend = Ended()
    backend.say("a", Exited(1, Outcome.FAILED, step, message="Node n is gone."))
    make(store, backend).step()
    (stopped,) = store.events(job="a", types=["stopped"])
    assert stopped["step"] == step


def test_a_job_that_is_gone_keeps_nobody_from_ending(store: Store) -> None:
    backend = Ended()
    backend.say("deleted", JoiningReplicaLost(1, 1, "its node is gone"))
    for name in ("a", "deleted", "c"):
        backend.say(name, Exited(1, Outcome.COMPLETE), {"attempt": 1, "points": [POINT]})
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
