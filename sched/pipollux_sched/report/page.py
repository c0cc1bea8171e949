"""The report as one self-contained HTML file, which is replaced atomically."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined

from pipollux_sched.report.charts.bubble import bubble, bubble_chart, missing, verdict
from pipollux_sched.report.charts.curves import goodput_chart, loss_charts
from pipollux_sched.report.charts.gantt import MAX_HOLDS, gantt, slot_use
from pipollux_sched.report.charts.prediction import (
    MAX_DRAWN,
    Accuracy,
    accuracies,
    mean_absolute_error,
    prediction_chart,
)
from pipollux_sched.report.charts.specs import Chart, chart_data, chart_scripts
from pipollux_sched.report.run.event_log import Event, EventLog, read_events
from pipollux_sched.report.run.records import JobRun, Run
from pipollux_sched.report.run.replay import Recorder
from pipollux_utils.atomic_write import write_output
from pipollux_utils.text import clean, count, duration, percent

from . import facts

MAX_DETAILED = 12
"""Number of jobs with their own charts; further jobs are only in the tables."""


class Figure(NamedTuple):
    """Charts of one job: its name and colour, the charts by name, and their description."""

    job: str
    colour: int
    charts: dict[str, Chart]
    words: str


class PredictionRow(NamedTuple):
    """One line of the table of step times."""

    job: str
    colour: int
    replicas: str
    atomic_bsz: str
    accum_steps: str
    reports: str
    measured: str
    predicted: str
    error: str
    first_error: str


def render_report(source: str | Path | Sequence[Event]) -> str:
    """Return the report of an event log as HTML.

    Args:
        source: path of an `events.jsonl`, or the events themselves.

    Raises:
        EventLogError: the file cannot be read or holds no event.

    Example:
        >>> html = render_report([{"time": 0.0, "type": "submitted", "job": "a", "spec": {}}])
        >>> html.startswith("<!doctype html>")
        True
    """
    log = read_events(source)
    recorder = Recorder()
    for event in log.events:
        recorder.add(event)
    return _render(recorder.run, log)


def write_report(source: str | Path | Sequence[Event], output: str | Path) -> Path:
    """Write the report of an event log (see `render_report`) atomically, and return its path.

    Raises:
        EventLogError: the log cannot be read or holds no event.
        OSError: `output` cannot be written.
    """
    path = Path(output)
    write_output(path, render_report(source).encode())
    return path


def _render(run: Run, log: EventLog) -> str:
    colours = {name: index for index, name in enumerate(run.jobs)}
    detailed = list(run.jobs.values())[:MAX_DETAILED]
    entries = accuracies(run)
    start = run.start or 0.0
    losses = [_loss(job, colours[job.name], start) for job in detailed]
    goodputs = [_goodput(job, colours[job.name], start) for job in detailed]
    bubbles = [_bubble(j, colours[j.name], run) for j in detailed if j.num_stages > 1]
    charts: dict[str, Chart | None] = {
        "gantt": gantt(run, colours),
        "prediction": prediction_chart(entries, colours),
    }
    for figure in (*losses, *goodputs, *bubbles):
        charts.update(figure.charts)
    drawn = {name: chart for name, chart in charts.items() if chart is not None}
    return (
        _environment()
        .get_template("template.html.j2")
        .render(
            title=facts.title(run),
            moment=facts.moment(run),
            cluster=facts.cluster(run),
            policy=clean(run.policy),
            summary=facts.summary(run),
            headlines=facts.headlines(run),
            jobs=[facts.job_row(job, colours[job.name]) for job in run.jobs.values()],
            num_left_out=len(run.jobs) - len(detailed),
            drawn=drawn,
            chart_data=chart_data(drawn),
            chart_scripts=chart_scripts(),
            gantt_words=_gantt_words(run),
            losses=losses,
            goodputs=goodputs,
            prediction_rows=[_prediction_row(e, colours) for e in entries[:MAX_DRAWN]],
            prediction_words=_prediction_words(entries),
            bubbles=bubbles,
            allocations=facts.allocation_rows(run, colours),
            allocations_left_out=max(len(run.allocations) - facts.MAX_ALLOCATIONS, 0),
            footer=_footer(log),
        )
    )


def _environment() -> Environment:
    folder = resources.files(__package__)

    def load(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    return Environment(
        loader=FunctionLoader(load),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _gantt_words(run: Run) -> str:
    use = slot_use(run)
    words = ""
    if use is not None:
        free = max(0.0, 1 - use.training - use.changing)
        words = (
            f"The slots were held by jobs in training for {percent(use.training)} of the time, by "
            f"jobs starting or stopping for {percent(use.changing)}, and free for {percent(free)}."
        )
    if run.nodes and not run.nodes_declared:
        words += " The log has no sizes of nodes; the chart shows the slots that were used."
    num_holds = sum(len(g.nodes) for j in run.jobs.values() for g in j.started)
    if num_holds > MAX_HOLDS:
        words += f" Of {num_holds} blocks the {MAX_HOLDS} longest are drawn."
    open_ends = [clean(j.name, 32) for j in run.jobs.values() if j.current is not None]
    if open_ends:
        words += f" The log ends while {', '.join(open_ends[:6])} still ran."
    return words.strip()


def _loss(job: JobRun, index: int, start: float) -> Figure:
    pictures = loss_charts(job, index, start)
    num_points = sum(p.loss is not None for p in job.points)
    words = "It reported no loss."
    if pictures:
        words = facts.continuations(job)
    elif num_points:
        words = "It reported its loss only once."
    names = (f"loss-{index}-by-step", f"loss-{index}-by-time")
    return Figure(clean(job.name), index, dict(zip(names, pictures, strict=False)), words)


def _goodput(job: JobRun, index: int, start: float) -> Figure:
    picture = goodput_chart(job, index, start)
    if picture is None:
        words = "It reported neither goodput, batch size nor efficiency."
        return Figure(clean(job.name), index, {}, words)
    return Figure(clean(job.name), index, {f"goodput-{index}": picture}, _goodput_words(job))


def _goodput_words(job: JobRun) -> str:
    gain = facts.speedup(job)
    if gain is None:
        return ""
    words = (
        f"Mean goodput with {count(gain.num_replicas, 'replica')} over that with one: "
        f"measured {gain.measured:.2f}×"
    )
    return words + (f", predicted {gain.predicted:.2f}×." if gain.predicted is not None else ".")


def _prediction_words(entries: Sequence[Accuracy]) -> str:
    error = mean_absolute_error(entries)
    if error is None:
        return "No job reported a measured and a predicted step time for the same step."
    return (
        f"Over {count(len(entries), 'configuration')} the mean absolute error is {percent(error)}. "
        "The model is fitted to what the job measures while it runs, so a dot (median prediction) "
        "mostly knows its configuration; a ring is the first prediction made in it."
        + (f" The first {MAX_DRAWN} are shown." if len(entries) > MAX_DRAWN else "")
    )


def _prediction_row(entry: Accuracy, colours: dict[str, int]) -> PredictionRow:
    return PredictionRow(
        job=clean(entry.job.name),
        colour=colours[entry.job.name],
        replicas=str(entry.num_replicas),
        atomic_bsz=str(entry.atomic_bsz),
        accum_steps=str(entry.accum_steps),
        reports=str(entry.num_reports),
        measured=duration(entry.measured, 3),
        predicted=duration(entry.predicted, 3),
        error=_signed(entry.error),
        first_error=_signed(entry.first_error),
    )


def _signed(share: float) -> str:
    return f"{'+' if share >= 0 else '−'}{percent(abs(share))}"


def _bubble(job: JobRun, index: int, run: Run) -> Figure:
    found = bubble(job)
    if found is None:
        return Figure(clean(job.name), index, {}, missing(job))
    charts: dict[str, Chart] = {f"bubble-{index}": bubble_chart(found, index)}
    return Figure(clean(job.name), index, charts, verdict(job, found, run))


def _footer(log: EventLog) -> str:
    words = f"Drawn from {count(len(log.events), 'event')}."
    if log.num_skipped:
        words += (
            f" {count(log.num_skipped, 'line')} of the log could not be read and "
            f"{'was' if log.num_skipped == 1 else 'were'} left out."
        )
    return words
