"""Elastic resizes in the report of a run: replicas come and go without a gap for the others."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from pipollux_sched.report.charts.gantt import holds, slot_use
from pipollux_sched.report.event_text import EVENT_TYPES, TELLING_TYPES, event_text
from pipollux_sched.report.live_view import LiveView
from pipollux_sched.report.page import render_report
from pipollux_sched.report.run.records import Run
from pipollux_sched.report.run.replay import Recorder
from pipollux_sched.report.run_events import clipped, store_events
from pipollux_sched.store import Store
from tests.extent import first
from tests.sched.report.page import Page, charts
from tests.sched.resize_events import JOB, elastic_run
from tests.sched.store.stores import Clock

Event = dict[str, Any]
SURVIVED = {
    "time": 1070.0,
    "type": "survived",
    "job": JOB,
    "attempt": 1,
    "membership": 5,
    "step": 69,
    "pause_seconds": 0.4,
    "lost": [0],
    "nodes": ["node-b"],
    "replicas": [1],
    "num_replicas": 1,
}


@pytest.fixture
def events(store: Store, clock: Clock) -> list[Event]:
    elastic_run(store, clock)
    return [dict(event) for event in store_events(store)]


def recorded(events: list[Event]) -> Run:
    recorder = Recorder()
    for event in events:
        recorder.add(event)
    return recorder.run


def test_every_event_is_a_sentence(events: list[Event]) -> None:
    told = [event_text(event) for event in events if event["type"] in TELLING_TYPES]
    assert told[3:-1] == [
        "grows from 1 to 2 replicas",
        "resizes: replica 1 on node-b is to join",
        "resized: 2 replicas on node-a, node-b train since step 29, after a pause of 250 ms",
        "grows from 2 to 3 replicas",
        "resizes: replica 2 on node-b is to join",
        "elastic resize given up: a port is taken",
        "moves to node-b",
        "resizes: replica 0 is to leave",
        "resized: 1 replica on node-b trains since step 59, after a pause of 50.0 ms",
        "moves to node-a; a restart, as none of its replicas stays where it is",
        "stopped and saved at step 79",
        "training since step 80, 10.0 s after it was asked to move",
    ]
    waiting_to_join = [
        event_text(event, every=True) for event in events if event["type"] == "waiting_to_join"
    ]
    assert waiting_to_join == ["replica 1 waits to join", "replica 2 waits to join"]
    assert {event["type"] for event in events} <= set(EVENT_TYPES)
    several: Event = {
        "type": "changing",
        "joining": [{"replica": 3, "node": "a"}, {"replica": 4, "node": "b"}],
        "leaving": [0, 1],
    }
    wanted = "resizes: replicas 3 on a and 4 on b are to join; replicas 0 and 1 are to leave"
    assert event_text(several) == wanted
    assert event_text({**SURVIVED, "pause_seconds": None, "step": None, "lost": [0, 2]}) == (
        "continues without replicas 0 and 2: 1 replica on node-b trains"
    )


def test_each_membership_is_recorded(events: list[Event]) -> None:
    job = recorded(events).jobs[JOB]
    assert [
        (one.number, one.membership, one.nodes, one.started, one.ended, one.outcome)
        for one in job.started
    ] == [
        (1, 1, ("node-a",), 1001.0, 1030.0, "changed"),
        (1, 2, ("node-a", "node-b"), 1030.0, 1060.0, "changed"),
        (1, 4, ("node-b",), 1060.0, 1082.0, "stopped"),
        (2, 1, ("node-a",), 1082.0, 1120.0, "complete"),
    ]
    assert [one.replicas for one in job.started] == [(0,), (0, 1), (1,), (0,)]
    assert [one.pause_seconds for one in job.started] == [None, 0.25, 0.05, None]
    assert (job.num_restarts, job.num_resizes) == (1, 2)
    assert [(one.elastic, one.why_restart) for one in job.allocations] == [
        *((False, ""), (True, ""), (True, ""), (True, "")),
        (False, "none of its replicas stays where it is"),
    ]


def test_who_stays_holds_its_slot_without_a_gap(events: list[Event]) -> None:
    """Who joins holds one from its own start, hatched until it trains."""
    run = recorded(events)
    placed = [(hold.node, hold.first_slot, hold.start, hold.end) for hold in holds(run)]
    assert sorted(placed, key=lambda one: one[2]) == [
        ("node-a", 0, 1001.0, 1030.0),
        ("node-b", 0, 1020.0, 1060.0),
        ("node-a", 0, 1030.0, 1060.0),
        ("node-b", 0, 1060.0, 1082.0),
        ("node-a", 0, 1082.0, 1120.0),
    ]
    gantt = charts(render_report(events))["gantt"]
    solid = sorted((one["start"], one["begin"], one["end"], one["to"]) for one in gantt["blocks"])
    assert solid == [
        (1.0, 5.0, 30.0, 30.0),
        (20.0, 30.0, 60.0, 60.0),
        (30.0, 30.0, 60.0, 60.0),
        (60.0, 60.0, 80.0, 82.0),
        (82.0, 90.0, 120.0, 120.0),
    ]
    tips = [
        [" ".join(line) if isinstance(line, list) else line for line in tip] for tip in _tips(gantt)
    ]
    (joined,) = [tip for tip in tips if tip[0] == "elastic, attempt 1, membership 2 on node-b"]
    assert joined[-2:] == ["on its way 10 s", "pause of surviving replicas 250 ms"]
    (stayed,) = [tip for tip in tips if tip[0] == "elastic, attempt 1, membership 2 on node-a"]
    assert stayed[-2:] == ["held 0:30 to 1:00", "pause of surviving replicas 250 ms"]
    use = slot_use(run)
    assert use is not None
    training = (1030 - 1005) + 2 * (1060 - 1030) + (1080 - 1060) + (1120 - 1090)
    assert use.training == pytest.approx(training / (4 * 120))


def _tips(gantt: Event) -> list[Any]:
    return json.loads(json.dumps(gantt["tips"]).replace("\\u202f", " "))  # type: ignore[no-any-return]  # JSON


def test_the_loss_curve_has_a_gap_at_the_restart_alone(events: list[Event]) -> None:
    drawn = charts(render_report(events))
    loss = drawn["loss-0-by-time"]
    (line,) = loss["panels"][0]["lines"]
    assert [len(piece) for piece in line["pieces"]] == [75, 29]
    assert loss["bands"] == [[80.0, 90.0]]
    marks = [
        (mark["at"], mark["label"], mark["flag"], mark.get("elastic")) for mark in loss["marks"]
    ]
    assert marks == [
        (30.0, "attempt 1, membership 2", "R = 2", True),
        (60.0, "attempt 1, membership 4", "R = 1", True),
        (90.0, "attempt 2", "R = 1", None),
    ]
    flags = [mark["flag"] for mark in drawn["loss-0-by-step"]["marks"]]
    assert flags == ["R = 2 from step 29", "R = 1 from step 59", "R = 1 from step 80"]


def test_resizes_are_counted_beside_restarts(events: list[Event]) -> None:
    page = Page(render_report(events))
    header = page.text("header")
    assert "1 restart, 10 s each at the median" in header
    assert "2 elastic resizes, 150 ms each at the median" in header
    assert f"{JOB} 1 1 → 2 → 1 1 2 119" in header
    assert (
        "It resized to 2 replicas at step 29, after a pause of 250 ms; resized to 1 "
        "replica at step 59, after a pause of 50.0 ms; stopped at step 79, went on with step 80 "
        "and 1 replica."
    ) in page.text("loss")
    assert "a restart, as none of its replicas stays where it is" in page.text("allocations")


def test_a_death_that_the_others_survive(events: list[Event]) -> None:
    """It is as an elastic resize, of which nobody was told before."""
    until = [event for event in events if event["time"] < 1055]
    run = recorded([*until, SURVIVED])
    job = run.jobs[JOB]
    assert job.current is not None
    assert (job.current.membership, job.current.nodes, job.phase) == (5, ("node-b",), "Running")
    assert job.attempts[-2].outcome == "survived"
    assert (job.num_resizes, job.num_restarts) == (2, 0)
    assert event_text(SURVIVED) == (
        "continues without replica 0: 1 replica on node-b trains since step 69, after a pause of "
        "400 ms"
    )
    lost: Event = {"type": "replicas_lost", "replicas": [0], "why": "node-a is dead"}
    assert event_text(lost) == "replica 0 is lost: node-a is dead"
    words = Page(render_report([*until, SURVIVED])).text("loss")
    assert "lost replicas and went on with 1 replica at step 69, after a pause of 400 ms" in words


def test_what_resizes_had_made_is_held_at_the_moment(events: list[Event]) -> None:
    """A report of the last while begins with it, and counts what was changed since."""
    job = recorded(clipped(events, 1040.0)).jobs[JOB]
    first, second, _ = job.started
    assert (first.number, first.membership, first.nodes) == (1, 2, ("node-a", "node-b"))
    assert (first.started, first.ended, second.membership) == (1040.0, 1060.0, 4)
    assert (job.num_resizes, job.num_restarts) == (1, 1)
    starts = {(hold.node, hold.start) for hold in holds(recorded(clipped(events, 1025.0)))}
    assert {("node-a", 1025.0), ("node-b", 1025.0), ("node-a", 1030.0)} <= starts


def test_the_terminal_follows_it(events: list[Event]) -> None:
    console = Console(file=StringIO(), width=160)
    with LiveView(console) as view:
        for event in events:
            view.on_event(event)
    view.print_summary()
    assert isinstance(console.file, StringIO)
    printed = console.file.getvalue()
    assert "[0:30] elastic: resized: 2 replicas on node-a, node-b train since step 29" in printed
    assert "moves to node-a; a restart, as none of its replicas stays where it is" in printed
    (row,) = [line.split() for line in printed.splitlines() if line.startswith(f" {JOB} ")][-1:]
    assert row[:8] == [JOB, "Complete", "1", "→", "2", "→", "1", "1"]
    assert row[8] == "2"


def test_decisions_of_one_round_share_a_table(events: list[Event]) -> None:
    """Also where one of them begins to resize at once; that is told below."""
    changing = next(i for i, event in enumerate(events) if event["type"] == "changing")
    decided = events[changing - 1]
    other = {**decided, "job": "other", "elastic": False, "attempt": 1, "why": "starts"}
    console = Console(file=StringIO(), width=160)
    with LiveView(console) as view:
        for event in [*events[: changing + 1], other, *events[changing + 1 : changing + 3]]:
            view.on_event(event)
    assert isinstance(console.file, StringIO)
    lines = [line.strip() for line in console.file.getvalue().splitlines()]
    begun = lines.index("[0:20] elastic: resizes: replica 1 on node-b is to join")
    assert lines.count("allocation at 0:20") == 1
    above = lines[lines.index("allocation at 0:20") : begun]
    assert any(line.startswith("other") for line in above)


@pytest.mark.parametrize(
    "kind", first(1, ["changing", "changed", "survived", "change_abandoned", "waiting_to_join"])
)
def test_fields_may_be_of_any_kind(events: list[Event], kind: str) -> None:
    odd: list[Any] = [None, "text", -1, 1e308, [], {}, True, [[1]], [{}], 10**400, ["a", 1]]
    event = next((one for one in events if one["type"] == kind), SURVIVED)
    for field in event.keys() - {"time", "type"}:
        log = [e for e in events if e["time"] < 1030 and e["type"] != "progress"]
        assert charts(render_report([*log, *({**event, field: value} for value in odd)])), field
