"""The live view shows the right numbers on a terminal, and plain lines anywhere else."""

from __future__ import annotations

import io
import re
import threading
import time
from typing import Any

import pytest
from rich.console import Console

from pipollux_sched.report.live_view import AllocationLine, LiveView, allocation_table

from . import synthetic_log as synthetic

Event = dict[str, Any]
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f]")


START: float = synthetic.START


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return list(synthetic.synthetic_log())


def terminal(width: int = 140, height: int = 40) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        height=height,
        color_system="truecolor",
        _environ={},
    )


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def plain(events: list[Event], *, interval: float = 5.0, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, _environ={})
    with LiveView(console, progress_interval=interval) as view:
        for event in events:
            view.on_event(event)
    view.print_summary()
    return printed(console)


def display(view: LiveView, width: int = 140) -> str:
    """Return what the display shows now, without colours."""
    console = Console(file=io.StringIO(), width=width, height=40, _environ={})
    console.print(view._render())
    return printed(console)


def words(line: str) -> str:
    return " ".join(line.split())


def test_plain_lines_have_no_control_characters(events: list[Event]) -> None:
    text = plain(events)
    assert not CONTROL.search(text)
    lines = [words(line) for line in text.splitlines()]
    assert "[0:00] char-lm: submitted" in lines
    assert "[2:00] char-lm: stopped and saved at step 663" in lines
    assert "[2:06] char-lm: training since step 664, 7.5 s after it was asked to move" in lines
    assert "[3:41] char-lm: complete at step 1391, epochs done: 3" in lines
    point = next(
        e for e in events if e["type"] == "progress" and e["job"] == "char-lm" and e["attempt"] == 2
    )
    assert point["goodput"] is None
    head = f"[2:06] char-lm: epoch {point['epoch']}/3, step 664, loss {point['loss']:.2f}, "
    tail = "– samples/s goodput, batch size 128 = 2×64×1, 2 replicas × 2 stages on node-0, node-1"
    assert head + tail in lines


def test_plain_progress_comes_every_few_seconds(events: list[Event]) -> None:
    lines = [line for line in plain(events, interval=20.0).splitlines() if "char-lm: epoch" in line]
    assert 9 <= len(lines) <= 11


def test_allocation_is_printed_once_a_round(events: list[Event]) -> None:
    text = plain(events)
    lines = [words(line) for line in text.splitlines()]
    assert [x for x in lines if x.startswith("allocation at")] == [
        "allocation at 0:01",
        "allocation at 0:49",
        "allocation at 1:18",
        "allocation at 1:58",
    ]
    assert "char-lm 2 1 node-0 64 1.00× unchanged" in lines
    row = "char-lm 2 1 → 2 node-0, node-1 128 1.71× digits completed and left node-1; two replicas"
    assert any(line.startswith(row) for line in lines)


def test_decisions_of_one_round_share_a_table() -> None:
    def allocated(job: str, nodes: list[str]) -> Event:
        head = {"time": START + 1, "type": "allocated", "job": job, "attempt": 1}
        return {**head, "nodes": nodes, "num_stages": 1, "previous": [], "why": "room"}

    text = plain([allocated("a", ["n"]), allocated("b", ["n", "n"])])
    assert text.count("allocation at") == 1
    assert "n × 2" in text


def test_display_shows_jobs_nodes_and_messages(events: list[Event]) -> None:
    console = terminal()
    view = LiveView(console)
    for event in events:
        if event["time"] < START + 100:
            view.on_event(event)
    screen = display(view)
    lines = [words(line) for line in screen.splitlines()]
    last = {e["job"]: e for e in events if e["type"] == "progress" and e["time"] < START + 100}
    char_lm, digits = last["char-lm"], last["digits"]
    assert any(
        line.startswith(
            f"■ char-lm Running {char_lm['epoch']}/3 {char_lm['step']} {char_lm['loss']:.2f} "
        )
        and line.endswith("128 = 1×64×2 1 replica × 2 stages on node-0")
        for line in lines
    )
    assert any(
        line.startswith(f"■ digits Running {digits['epoch']} {digits['step']} ")
        and line.endswith("192 = 2×96×1 2 replicas on node-1 × 2")
        for line in lines
    )
    assert "node-0 char-lm" in lines
    assert "node-1 digits digits" in lines
    assert "[1:23] digits: training since step 509, 5.3 s after it was asked to move" in lines
    assert any(line.startswith("Pipollux 1:") and "policy pollux" in line for line in lines)


@pytest.mark.parametrize("width", [40, 80, 107, 108, 200])
def test_display_fits_any_width(events: list[Event], width: int) -> None:
    view = LiveView(terminal(width=width))
    for event in events[:1000]:
        view.on_event(event)
    assert all(len(line) <= width for line in display(view, width).splitlines())


def test_terminal_gets_a_display_that_goes_away(events: list[Event]) -> None:
    console = terminal()
    with LiveView(console) as view:
        for event in events:
            view.on_event(event)
    view.stop()
    view.print_summary()
    text = printed(console)
    assert "\x1b[?25l" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is back"
    assert "allocation at 1:58" in text
    assert "after 3 min 41 s" in text


def test_summary_tells_what_became_of_the_jobs(events: list[Event]) -> None:
    lines = [words(line) for line in plain(events).splitlines()]
    losses = [e["loss"] for e in events if e["type"] == "progress" and e["job"] == "char-lm"]
    loss = f"{losses[0]:.2f} → {losses[-1]:.2f}"
    row = next(line for line in reversed(lines) if line.startswith("char-lm Complete"))
    assert row.startswith(f"char-lm Complete 1 → 2 1 0 1391 3 {loss}")
    assert row.endswith("1.71×")


def test_hostile_text_is_shown_as_text() -> None:
    name = "[bold]x[/bold][/]\x1b]0;title\x07\r\n"
    log: list[Event] = [
        {"time": START, "type": "cluster", "nodes": {name: {"slots": 1}}, "policy": name},
        {"time": START, "type": "submitted", "job": name, "spec": {}},
        {"time": START, "type": "allocated", "job": name, "nodes": [name], "why": name},
        {"time": START, "type": "failed", "job": name, "why": name},
    ]
    text = plain(log)
    assert not CONTROL.search(text)
    assert "[bold]x[/bold][/]" in text
    view = LiveView(terminal())
    for event in log:
        view.on_event(event)
    assert "[bold]x[/bold][/]" in display(view)


def test_events_from_many_threads_while_it_draws(events: list[Event]) -> None:
    """No thread waits for another for ever, and no event is lost."""
    console = terminal()
    own = [e for e in events if e["type"] == "progress"][:200]

    def feed(view: LiveView, name: str) -> None:
        view.on_event({"time": START, "type": "submitted", "job": name, "spec": {}})
        for event in own:
            view.on_event({**event, "job": name})

    with LiveView(console) as view:
        threads = [threading.Thread(target=feed, args=(view, f"job-{i}")) for i in range(4)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 240
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in threads)
    assert [len(job.points) for job in view.run.jobs.values()] == [200] * 4


def test_long_runs_keep_the_first_and_the_latest_reports(
    events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipollux_sched.report.live_view.KEPT_POINTS", 10)
    view = LiveView(Console(file=io.StringIO(), _environ={}))
    for event in events:
        view.on_event(event)
    points = view.run.jobs["char-lm"].points
    assert len(points) <= 11
    assert points[0].step == 1


def test_a_stream_that_knows_few_characters_gets_question_marks(events: list[Event]) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=stream, width=120, _environ={})
    with LiveView(console) as view:
        for event in events:
            view.on_event(event)
    view.print_summary()
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    assert b"1 ? 2" in stream.buffer.getvalue()


def test_allocation_table_for_other_commands() -> None:
    rows = [
        AllocationLine("a", 2, ["x", "x", "y"], None, None, "two nodes are free", 1),
        AllocationLine("b", 1, [], 32, 1.234, "no room", 1),
    ]
    console = Console(file=io.StringIO(), width=120, _environ={})
    console.print(allocation_table(rows, title="a plan"))
    lines = [words(line) for line in printed(console).splitlines()]
    assert "a plan" in lines
    assert "a 2 1 → 3 x × 2, y – – two nodes are free" in lines
    assert "b 1 1 → 0 – 32 1.23× no room" in lines
