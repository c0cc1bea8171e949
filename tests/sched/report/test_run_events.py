"""Which events of a run a report is drawn from: of some jobs, since a moment, thinned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipollux_sched.lifecycle import Allocate, Exited, FirstStep, Outcome, Started
from pipollux_sched.report import run_events
from pipollux_sched.report.page import render_report
from pipollux_sched.report.run.records import Run
from pipollux_sched.report.run.replay import Recorder
from pipollux_sched.store import Store
from tests.sched.store.stores import on_each_database
from tests.sched.store.test_retention import point


def recorded(events: list[Any]) -> Run:
    recorder = Recorder()
    for event in events:
        recorder.add(event)
    return recorder.run


def keep(place: Path | str, num_points: int) -> Store:
    """A store in which `old` has ended at 40, and `toy` moves at 60 and trains on to 160."""
    now = [0.0]
    store = Store(place, create=True, clock=lambda: now[0])
    store.add_event("cluster", {"nodes": {"a": {"slots": 2, "kind": "cpu"}}, "policy": "P"})
    for name in ("old", "toy"):
        store.submit(name, {"name": name, "num_stages": 1}, "token", 1)
        now[0] += 10.0
        store.transition(name, Allocate(["a"], "free"))
        store.transition(name, Started(1, ("1",)))
    now[0] = 40.0
    store.transition("old", Exited(1, Outcome.COMPLETE))
    store.transition("toy", FirstStep(1, 1))
    now[0] = 60.0
    store.transition("toy", Allocate(["a", "a"], "grows"))
    store.transition("toy", Exited(1, Outcome.STOPPED, step=5))
    store.transition("toy", Started(2, ("1",)))
    for number in range(num_points):
        now[0] = 60.0 + 100.0 * (number + 1) / num_points
        store.add_report("toy", 2, [point(number + 6, now[0])])
    return store


@on_each_database
def test_progress_is_thinned_and_the_rest_is_whole(
    place: Path | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_events, "POINTS", 40)
    monkeypatch.setattr(run_events, "_FEWEST", 2)
    with keep(place, 100) as store:
        whole, thin = recorded(store.events()), run_events.store_events(store)
        run = recorded(thin)
        steps = [entry.step for entry in run.jobs["toy"].points]
        assert (len(steps), steps[0], steps[-1]) == (20, 6, 105)
        assert {entry.attempt for entry in run.jobs["toy"].points} == {2}
        assert run.jobs["toy"].attempts == whole.jobs["toy"].attempts
        assert run.nodes == whole.nodes
        assert (run.start, run.end) == (whole.start, whole.end)
        (one,) = recorded(run_events.store_events(store, ["old"])).jobs
        assert one == "old"


@on_each_database
def test_what_was_held_at_the_moment_begins_there(place: Path | str) -> None:
    with keep(place, 4) as store:
        run = recorded(run_events.store_events(store, since=50.0))
        assert list(run.jobs) == ["toy"], "the other one had ended"
        first, second = run.jobs["toy"].started
        assert (first.started, first.ended, second.started) == (50.0, 60.0, 60.0)
        assert first.nodes == ("a",)
        assert (run.start, run.nodes["a"].slots, run.policy) == (50.0, 2, "P")
        run = recorded(run_events.store_events(store, since=100.0))
        (only,) = run.jobs["toy"].started
        assert (only.number, only.started, only.nodes) == (2, 100.0, ("a", "a"))
        assert [entry.step for entry in run.jobs["toy"].points] == [7, 8, 9]


def test_a_deleted_job_is_told_of_no_more() -> None:
    submitted = {"time": 0.0, "type": "submitted", "job": "toy", "spec": {}}
    gone = {"time": 1.0, "type": "deleted", "job": "toy"}
    run = recorded([{**submitted, "job": "other"}, submitted, gone])
    assert list(run.jobs) == ["other"]
    assert run_events.clipped([submitted, gone], 2.0) == []


def test_what_is_too_much_to_draw_is_left_out_and_said_to_be(
    monkeypatch: pytest.MonkeyPatch, place: Path | str
) -> None:
    with keep(place, 2) as store:
        events = run_events.store_events(store)
    monkeypatch.setattr("pipollux_sched.report.page.MAX_HOLDS", 2)
    monkeypatch.setattr("pipollux_sched.report.charts.gantt.MAX_HOLDS", 2)
    monkeypatch.setattr("pipollux_sched.report.facts.MAX_ALLOCATIONS", 1)
    page = render_report(events)
    assert "Of 4 blocks the 2 longest are drawn." in page
    assert "2 earlier ones are left out." in page
