"""The report of a synthetic run tells its facts, needs nothing but itself, survives anything."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from pipollux_perfmodel import Schedule, bubble_fraction, gpipe_schedule
from pipollux_sched.report.charts.bubble import bubble
from pipollux_sched.report.charts.curves import thinned
from pipollux_sched.report.charts.gantt import Hold, holds, slot_use
from pipollux_sched.report.charts.prediction import accuracies, mean_absolute_error
from pipollux_sched.report.charts.specs import chart_scripts
from pipollux_sched.report.page import render_report, write_report
from pipollux_sched.report.run.event_log import EventLogError
from pipollux_sched.report.run.records import Run
from pipollux_sched.report.run.replay import Recorder
from pipollux_utils.text import clean, grouped
from tests.extent import first
from tests.programs import run_pipollux
from tests.sched.report.page import Page, charts

from . import synthetic_log as synthetic

Event = dict[str, Any]
START: float = synthetic.START


def run_of(events: list[Event]) -> Run:
    recorder = Recorder()
    for event in events:
        recorder.add(event)
    return recorder.run


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return list(synthetic.synthetic_log())


@pytest.fixture(scope="module")
def html(events: list[Event]) -> str:
    return render_report(events)


@pytest.mark.parametrize(
    ("interval", "says"),
    [(100, "Replicas push and pull every 100 steps: 2 s each time"), (0, ""), ("often", "")],
)
def test_header_tells_what_pushes_and_pulls_cost(
    interval: object, says: str, events: list[Event]
) -> None:
    first = next(e for e in events if e["type"] == "hints")
    params = dict.fromkeys(("alpha_c", "beta_c", "beta_n", "alpha_r", "beta_r"), 0.01)
    params |= {"alpha_n": 2.0, "gamma": 1.0, "sync_every": interval}
    sent = {**first, "hints": {"initBatchSize": 32, "numStages": 2, "perfParams": params}}
    header = Page(render_report([*events[:-1], sent, events[-1]])).text("header")
    assert ("Replicas push and pull" in header) == bool(says)
    assert says in header


def test_header_tells_the_headline_numbers(html: str, events: list[Event]) -> None:
    header = Page(html).text("header")
    assert "char-lm and digits on two nodes" in header
    assert "2 nodes with 4 CPU slots" in header
    assert "3 min 41 s" in header
    assert "Both completed." in header
    losses = [e["loss"] for e in events if e["type"] == "progress" and e["job"] == "char-lm"]
    steps = next(e["step"] for e in events if e["type"] == "complete" and e["job"] == "char-lm")
    row = f"char-lm 2 1 → 2 1 0 {steps:,}".replace(",", " ")
    assert f"{row} 3 {grouped(losses[0])} → {grouped(losses[-1])}" in header
    assert "1.71×" in header
    assert "2 restarts, 6.4 s each at the median" in header


def test_sections_say_what_the_log_says(html: str) -> None:
    page = Page(html)
    assert "stopped at step 663, went on with step 664 and 2 replicas" in page.text("loss")
    assert (
        "Mean goodput with 2 replicas over that with one: measured 1.71×, predicted 1.71×."
        in page.text("goodput")
    )
    assert "drives all stages of a replica on CPUs from one thread" in page.text("bubble")
    allocations = page.text("allocations")
    assert "1:58 char-lm 2 1 → 2 node-0, node-1 128 1.71× digits completed" in allocations
    assert "1:18 digits 1 1 → 2 node-1 × 2 192 1.82×" in allocations


def test_whose_a_job_is_and_what_it_runs(events: list[Event]) -> None:
    log = [dict(event) for event in events]
    (submitted,) = (e for e in log if e["type"] == "submitted" and e["job"] == "digits")
    submitted["spec"] |= {"user": "ana", "team": "vision", "args": ["--note", "two words", ""]}
    header = Page(render_report(log)).text("header")
    assert "ana, team vision · examples/digits.py --note 'two words' ''" in header
    assert "examples/char_lm.py" in header


def test_the_file_needs_nothing_but_itself(html: str) -> None:
    """See `test_drawing.py` for what it asks for in a browser."""
    page = Page(html)
    assert page.references == []
    assert not page.tags & {"link", "img", "iframe", "object", "embed", "base"}
    without_scripts = re.sub(r"(?s)<script.*?</script>", "", html)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", without_scripts)


def test_ids_are_unique(html: str) -> None:
    ids = Page(html).ids
    assert len(ids) == len(set(ids))


def test_gantt_draws_each_replica_as_one_block_inside_its_node(html: str) -> None:
    gantt = charts(html)["gantt"]
    blocks = gantt["blocks"]
    tips = [" ".join(map(str, gantt["tips"][block["tip"]])) for block in blocks]
    for expected, times in (
        ("char-lm, attempt 1 on node-0 ['replicas', '1'] ['stages', '2']", 1),
        ("char-lm, attempt 2 on node-0 ['replicas', '2'] ['stages', '2']", 1),
        ("char-lm, attempt 2 on node-1 ['replicas', '2'] ['stages', '2']", 1),
        ("digits, attempt 2 on node-1", 2),
    ):
        assert sum(tip.startswith(expected) for tip in tips) == times
    assert [(group["name"], group["rows"]) for group in gantt["groups"]] == [
        *(("node-0", 2), ("node-1", 2))
    ]
    tall = [block for block in blocks if block["rows"] == 2]
    assert len(tall) == 3
    assert {block["row"] for block in tall} == {0}
    words = {words for block in blocks for words in block["words"]}
    words |= {flag["words"] for flag in gantt["flags"]}
    assert {"char-lm submitted", "digits complete", "R = 1", "R = 2"} <= words


def test_an_end_at_the_very_end_is_flagged(events: list[Event]) -> None:
    """Rounding takes no flag beyond the axis, where it would not be drawn."""
    log = [*events[:-1], {**events[-1], "time": START + 221.4057}]
    gantt = charts(render_report(log))["gantt"]
    last = gantt["flags"][-1]
    assert last["words"] == "char-lm complete"
    assert last["at"] <= gantt["x"]["high"]


def test_slots_never_hold_two_replicas(events: list[Event]) -> None:
    placed = holds(run_of(events))
    assert len(placed) == 6

    def slots(hold: Hold) -> set[int]:
        return set(range(hold.first_slot, hold.first_slot + hold.attempt.num_stages))

    for i, a in enumerate(placed):
        for b in placed[i + 1 :]:
            if a.node == b.node and a.start < b.end and b.start < a.end:
                assert not slots(a) & slots(b)


def test_slot_use_counts_slot_seconds(events: list[Event]) -> None:
    use = slot_use(run_of(events))
    assert use is not None
    total = 4 * 221.4
    training = 2 * (118.6 - 5.9) + 4 * (221.4 - 126.1) + (78.1 - 52.6) + 2 * (118.2 - 83.4)
    held = 2 * (120.3 - 1.3) + 4 * (221.4 - 120.6) + (79.3 - 49.0) + 2 * (118.2 - 79.5)
    assert use.training == pytest.approx(training / total)
    assert use.changing == pytest.approx((held - training) / total)


def test_bubble_compares_with_the_ideal_schedule(events: list[Event]) -> None:
    run = run_of(events)
    found = bubble(run.jobs["char-lm"])
    assert found is not None
    timeline = found.timeline
    spans = sorted(t.makespan for t in run.jobs["char-lm"].timelines)
    assert timeline.makespan == spans[(len(spans) - 1) // 2]
    assert found.measured_bubble == pytest.approx(bubble_fraction(timeline.events, 2))
    assert found.overlap == 0.0
    ideal = gpipe_schedule([1.0, 1.0], [2.0, 2.0], 4)
    even = timeline._replace(events=tuple(ideal))
    run.jobs["char-lm"].timelines = [even]
    same = bubble(run.jobs["char-lm"])
    assert same is not None
    assert same.measured_bubble == pytest.approx(same.ideal_bubble) == pytest.approx(1 / 5)
    assert same.ideal_makespan == pytest.approx(even.makespan)
    # Recomputation and gradient are told as two events of the same micro-batch.
    halves = [
        part
        for event in ideal
        for middle in [(event.start + event.end) / 2]
        for part in (
            [event._replace(end=middle), event._replace(start=middle)]
            if event.phase == "backward"
            else [event]
        )
    ]
    run.jobs["char-lm"].timelines = [timeline._replace(events=tuple(halves))]
    split = bubble(run.jobs["char-lm"])
    assert split is not None
    assert split.ideal_makespan == pytest.approx(even.makespan)
    assert same.overlap == pytest.approx(18 / 24)


def test_bubble_is_held_against_the_jobs_own_schedule(events: list[Event]) -> None:
    """With unequal stages 1F1B idles less than GPipe, so that its own ideal tells the truth."""
    times = (3.0, 1.0), (1.0, 3.0)
    own = Schedule("1f1b", *times, num_microbatches=4)
    assert own.bubble_fraction < Schedule("gpipe", *times, num_microbatches=4).bubble_fraction - 0.1
    told = {"step": 5, "num_stages": 2, "num_microbatches": 4, "events": own.events}
    log = [{**e, **told, "schedule": "1f1b"} if e["type"] == "timeline" else e for e in events]
    found = bubble(run_of(log).jobs["char-lm"])
    assert found is not None
    assert found.measured_bubble == found.ideal_bubble == pytest.approx(own.bubble_fraction)
    assert found.ideal_makespan == pytest.approx(own.makespan)
    words = Page(render_report(log)).text("bubble")
    assert "1F1B's ideal with the same stage times would take 20.0 s with 20 % idle" in words
    # What does not say goes by GPipe's order, as all jobs once did.
    for event in log:
        event.pop("schedule", None)
    other = bubble(run_of(log).jobs["char-lm"])
    assert other is not None
    assert other.ideal_bubble > other.measured_bubble + 0.1


def test_interleaved_chunks_are_drawn_in_their_stages_row(events: list[Event]) -> None:
    own = Schedule("interleaved", (1.0,) * 4, (2.0,) * 4, 4, stages_per_device=2)
    work = [event._replace(stage=event.stage % 2) for event in own.events]
    told = {"step": 5, "num_stages": 2, "num_microbatches": 4, "events": work}
    log = [
        {**e, **told, "schedule": "interleaved"} if e["type"] == "timeline" else e for e in events
    ]
    found = bubble(run_of(log).jobs["char-lm"])
    assert found is not None
    assert found.measured_bubble == pytest.approx(found.ideal_bubble)
    html = render_report(log)
    assert "interleaved 1F1B's ideal" in Page(html).text("bubble")
    assert {block["row"] for block in charts(html)["bubble-0"]["blocks"]} == {0, 1}


def test_time_line_numbers_every_micro_batch(html: str) -> None:
    blocks = charts(html)["bubble-0"]["blocks"]
    for style in ("forward", "backward"):
        words = [block["words"] for block in blocks if block["style"] == style]
        assert sorted(words) == sorted([[str(number)] for number in range(4)] * 2 * 2)


def test_prediction_errors_are_medians_per_configuration() -> None:
    def point(step: int, step_time: float, predicted: float | None, replicas: int) -> Event:
        return {
            "time": START + step,
            "type": "progress",
            "job": "a",
            "step": step,
            "step_time": step_time,
            "predicted_step_time": predicted,
            "num_replicas": replicas,
            "atomic_bsz": 32,
            "accum_steps": 0,
        }

    log = [
        point(1, 1.0, None, 1),
        point(2, 1.0, 1.5, 1),
        point(3, 9.0, 1.1, 1),
        point(4, 1.0, 1.1, 1),
        point(5, 2.0, 1.0, 2),
    ]
    one, two = accuracies(run_of(log))
    assert (one.measured, one.predicted, one.first_predicted) == (1.0, 1.1, 1.5)
    assert (one.num_reports, two.num_reports) == (4, 1)
    assert two.error == pytest.approx(-0.5)
    assert mean_absolute_error([one, two]) == pytest.approx(0.3)


HOSTILE = "<script>alert('x')</script>&\"\x1b[31m\u202e\ud800\x00 ]]>"


def test_hostile_names_are_text() -> None:
    log = [
        {**e, "job": HOSTILE if e["job"] == "char-lm" else e["job"]}
        for e in synthetic.synthetic_log()
    ]
    for event in log:
        if event["type"] == "allocated":
            event["why"] = HOSTILE
        if event["type"] == "cluster":
            event["policy"] = HOSTILE
    log.append({"time": START + 300, "type": "failed", "job": HOSTILE, "why": HOSTILE * 50})
    html = render_report(log)
    page = Page(html)
    assert html.count("<script") == 3, "the data, the library and what draws with it"
    assert "<script>alert('x')</script>&" in page.text("allocations")
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e\ud800]", html)
    html.encode("utf-8")
    assert "alert('x')" in str(charts(html)["gantt"])


@pytest.mark.parametrize("kept", [0.0, 0.002, 0.01, 0.1, 0.3, 0.5, 0.7, 0.95])
def test_a_log_may_end_anywhere(events: list[Event], kept: float) -> None:
    page = Page(render_report(events[: math.ceil(kept * len(events))]))
    assert "Allocation over time" in page.text("slots")


@pytest.mark.parametrize(
    "left_out",
    [
        "cluster",
        "submitted",
        "allocated",
        "started",
        "first_step",
        "stopping",
        "stopped",
        "progress",
        "timeline",
        "complete",
    ],
)
def test_a_log_may_lack_any_type_of_event(events: list[Event], left_out: str) -> None:
    html = render_report([e for e in events if e["type"] != left_out])
    page = Page(html)
    charts(html)
    if left_out == "progress":
        assert "It reported no loss." in page.text("loss")
        assert "No job reported a measured and a predicted step time" in page.text("prediction")
    if left_out == "timeline":
        assert "No time line of a step was recorded." in page.text("bubble")
    if left_out == "allocated":
        assert "The log has no allocations." in page.text("allocations")
    if left_out == "cluster":
        assert "The log has no sizes of nodes" in page.text("slots")
    if left_out == "complete":
        assert "still running when the log ends" in page.text("header")


@pytest.mark.parametrize("third", first(1, range(3)))
def test_fields_may_be_of_any_kind(events: list[Event], third: int) -> None:
    """Whatever a field holds, the report is drawn: nothing trusts the log."""
    odd: list[Any] = [None, "text", -1, 0, 1e308, float("nan"), [], {}, True, [[1]], 10**400]
    sample = {e["type"]: e for e in events}
    for kind, event in sample.items():
        for field in sorted(event.keys() - {"time", "type"})[third::3]:
            log = [e for e in events if e["type"] != "progress"][:40]
            log += [{**event, field: value} for value in odd]
            html = render_report([*log, *[e for e in events if e["type"] == "progress"][:5]])
            assert charts(html) is not None, (kind, field)


def test_a_crash_is_told(events: list[Event]) -> None:
    cut = [e for e in events if e["time"] < START + 30]
    crash = {"time": START + 30, "type": "restarting", "job": "char-lm", "attempt": 1}
    again = {"time": START + 32, "type": "started", "job": "char-lm", "attempt": 2}
    first = {"time": START + 36, "type": "first_step", "job": "char-lm", "attempt": 2}
    log = [
        *cut,
        {**crash, "why": "a worker ended with exit status 1", "restarts": 1},
        again,
        {**first, "step": 101, "restart_seconds": None},
        {"time": START + 40, "type": "failed", "job": "char-lm", "attempt": 2, "why": "twice"},
    ]
    page = Page(render_report(log))
    assert "went on with step 101 and 1 replica" in page.text("loss")
    assert "Failed twice" in page.text("header")
    assert "1 restart, 6.0 s each" in page.text("header")


def test_write_report_reads_a_file_cut_in_the_middle(events: list[Event], tmp_path: Path) -> None:
    log = synthetic.write_log(tmp_path / "events.jsonl", events[:200])
    with log.open("a") as file:
        file.write('{"time": 17')
    output = tmp_path / "deep" / "report.html"
    assert write_report(log, output) == output
    assert "1 line of the log could not be read and was left out" in output.read_text()
    assert [p.name for p in output.parent.iterdir()] == ["report.html"]


def test_unreadable_logs_are_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(EventLogError, match=r"missing\.jsonl: cannot read .*No such file"):
        render_report(tmp_path / "missing.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("not json\n[1]\n" + json.dumps({"type": "x"}))
    with pytest.raises(EventLogError, match="no event found; an event log has one JSON object"):
        render_report(empty)


def test_many_jobs_and_nodes_stay_small() -> None:
    nodes = {f"node-{i:02}": {"slots": 8, "kind": "gpu"} for i in range(16)}
    log: list[Event] = [{"time": START, "type": "cluster", "nodes": nodes, "policy": "pollux"}]
    for i in range(60):
        head = {"job": f"job-{i:02}", "attempt": 1}
        begin = START + 60 * i
        where = [f"node-{i % 16:02}"]
        log += [
            {"time": begin, "type": "submitted", **head, "spec": {"num_stages": 2}},
            {"time": begin + 1, "type": "allocated", **head, "nodes": where, "num_stages": 2},
            {"time": begin + 2, "type": "started", **head},
            {"time": begin + 9, "type": "first_step", **head, "step": 1},
            {"time": begin + 900, "type": "complete", **head, "step": 900, "epoch": 1},
        ]
    html = render_report(sorted(log, key=lambda e: e["time"]))
    page = Page(html)
    assert "60 jobs on 16 nodes" in page.text("header")
    assert "48 more jobs are in the tables only" in page.text("loss")
    assert len(html) - len("".join(chart_scripts())) < 100_000


def test_thinning_keeps_the_last_report(events: list[Event]) -> None:
    points = run_of(events).jobs["char-lm"].points
    few = thinned(points, 50)
    assert len(few) <= 52
    assert few[-1] is points[-1]


def test_clean_takes_out_what_terminals_and_xml_choke_on() -> None:
    assert clean("a\x1b[31mb\nc\ud800\u202e") == "a\N{REPLACEMENT CHARACTER}[31mb c" + 2 * "�"
    assert clean("abcdefgh", 5) == "abcd…"


def test_command_draws_the_report_anew(events: list[Event], tmp_path: Path) -> None:
    log = synthetic.write_log(tmp_path / "events.jsonl", events[:300])
    done = run_pipollux("report", log, "--save", tmp_path / "r.html")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    for arguments, code in (
        ([str(tmp_path / "no.jsonl")], 2),
        ([str(log), "--save", str(tmp_path)], 1),
    ):
        bad = run_pipollux("report", *arguments)
        assert bad.returncode == code
        assert "Traceback" not in bad.stderr
        assert bad.stderr.startswith("Error: ")
