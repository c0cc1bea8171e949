"""What a job reported over its restarts: its loss, its goodput, batch size and replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from markupsafe import Markup

from pipollux_sched.report.run.records import Generation, JobRun, RunPoint
from pipollux_sched.utils.text import amount, clock, percent, plain

from .axes import Panel, Scale, clock_ticks, padded, ticks, whole_ticks
from .svg import WIDTH, Drawing, colour_class, text_width

LEFT, RIGHT = 64.0, 16.0
MAX_POINTS = 1500
"""Reports drawn per curve; of more, every n-th is taken, so that the page stays small."""


def smoothed(values: Sequence[float], span: int) -> list[float]:
    """Return each value as the line through its `span` neighbours has it (least squares).

    A line, not a mean, so that a steep curve is not shifted where its window is cut at an end.

    >>> smoothed([1.0, 2.0, 3.0, 4.0], span=3)
    [1.0, 2.0, 3.0, 4.0]
    """
    reach = max(1, span // 2)
    out = []
    for i in range(len(values)):
        first = max(0, i - reach)
        window = values[first : i + reach + 1]
        middle, mean = (len(window) - 1) / 2, fmean(window)
        spread = sum((j - middle) ** 2 for j in range(len(window))) or 1.0
        slope = sum((j - middle) * v for j, v in enumerate(window)) / spread
        out.append(mean + slope * (i - first - middle))
    return out


def smoothing_span(num_points: int) -> int:
    """Return over how many reports a curve of so many is smoothed: a twentieth, 3 to 61, odd."""
    return max(3, min(61, num_points // 20)) | 1


def thinned(points: Sequence[RunPoint], most: int = MAX_POINTS) -> list[RunPoint]:
    """Return at most about `most` of the points, evenly taken, the last one always."""
    stride = math.ceil(len(points) / most) if points else 1
    kept = list(points[::stride])
    if points and kept[-1] is not points[-1]:
        kept.append(points[-1])
    return kept


class Segment(NamedTuple):
    """The reports of one generation, in order."""

    generation: int
    points: list[RunPoint]


def segments(points: Iterable[RunPoint]) -> list[Segment]:
    """Cut a job's reports where its generation changes."""
    out: list[Segment] = []
    for point in points:
        if not out or out[-1].generation != point.generation:
            out.append(Segment(point.generation, []))
        out[-1].points.append(point)
    return out


def _restarts(job: JobRun) -> list[tuple[Generation, float, int]]:
    """Return the generations after the first that trained: from what time and step on."""
    trained = [
        (g, g.first_step, g.first_step_number)
        for g in job.started
        if g.first_step is not None and g.first_step_number is not None
    ]
    return [(g, time, step) for g, time, step in trained[1:] if time is not None]


def draw_loss(job: JobRun, index: int, start: float) -> Markup | None:
    """Draw a job's loss by step and by time; None when it reported fewer than two losses.

    Args:
        job: the job with its reports.
        index: the job's number on the page, for its colour and the ids.
        start: when the run began, unix time.
    """
    points = [p for p in job.points if p.loss is not None]
    if len(points) < 2:
        return None
    points = thinned(points)
    losses = [p.loss or 0.0 for p in points]
    top, bottom = 36.0, 220.0
    drawing = Drawing(f"loss-{index}", bottom + 42, f"Loss of {job.name} by step and by time")
    y = Scale(*padded(losses), bottom, top)
    middle = WIDTH / 2
    by_step = Panel(Scale(*_limits(p.step for p in points), LEFT, middle - 18), y)
    by_time = Panel(Scale(*_limits(p.time for p in points), middle + 34, WIDTH - RIGHT), y)
    marks = ticks(y.low, y.high, 5)
    by_step.draw_y(drawing, marks)
    by_time.draw_y(drawing, marks, labels=False)
    steps = whole_ticks(by_step.x.low, by_step.x.high, 5)
    by_step.draw_x(drawing, steps, amount, label="step")
    moments = [m + start for m in clock_ticks(by_time.x.low - start, by_time.x.high - start, 5)]
    by_time.draw_x(drawing, moments, lambda v: clock(v - start), label="time")
    drawing.text(0, top - 16, "loss", "axis-label")
    _pauses(drawing, by_time, job, index)
    restarts = _restarts(job)
    _poles(drawing, by_step, [(step, g) for g, _, step in restarts], index, "from step")
    _poles(drawing, by_time, [(time, g) for g, time, _ in restarts], index, "")
    ways: tuple[tuple[Panel, Callable[[RunPoint], float]], ...] = (
        (by_step, lambda p: p.step),
        (by_time, lambda p: p.time),
    )
    for panel, at in ways:
        _curve(drawing, panel, points, at, lambda p: p.loss, index)
    return drawing.markup()


def _limits(values: Iterable[float]) -> tuple[float, float]:
    known = list(values)
    low, high = min(known), max(known)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _pauses(drawing: Drawing, panel: Panel, job: JobRun, colour: int) -> None:
    """Hatch the times in which the job held its slots or waited for them, but did not train."""
    trained = [g for g in job.started if g.first_step is not None]
    for before, after in pairwise(trained):
        begin = before.stopping or before.ended
        if begin is None or after.first_step is None:
            continue
        left = max(panel.left, panel.x(begin))
        right = min(panel.right, panel.x(after.first_step))
        if right > left:
            height = panel.bottom - panel.top
            fill = drawing.hatch(colour)
            drawing.rect(left, panel.top, right - left, height, "pause", fill=fill)


def _poles(
    drawing: Drawing,
    panel: Panel,
    places: Sequence[tuple[float, Generation]],
    colour: int,
    lead: str,
) -> None:
    """Mark where a generation began and with how many replicas; no label covers another."""
    free_from = panel.left
    for value, generation in places:
        x = panel.x(value)
        drawing.line(x, panel.top - 6, x, panel.bottom, f"pole {colour_class(colour)}")
        words = f"R = {generation.num_replicas}"
        if lead:
            words += f" {lead} {amount(value)}"
        half = text_width(words) / 2 + 4
        middle = min(max(x, panel.left + half), panel.right - half)
        if middle - half >= free_from:
            drawing.text(middle, panel.top - 13, words, "flag", at="middle")
            free_from = middle + half + 6


def _curve(
    drawing: Drawing,
    panel: Panel,
    points: Sequence[RunPoint],
    at: Callable[[RunPoint], float],
    value: Callable[[RunPoint], float | None],
    colour: int,
) -> None:
    """Draw values thin and their smoothed course thick; the curve is cut at restarts."""
    known = [p for p in points if value(p) is not None]
    span = smoothing_span(len(known))
    shade = colour_class(colour)
    for segment in segments(known):
        places = [at(p) for p in segment.points]
        values = [value(p) or 0.0 for p in segment.points]
        drawing.path(panel.points(zip(places, values, strict=True)), f"raw {shade}")
        means = smoothed(values, span)
        drawing.path(panel.points(zip(places, means, strict=True)), f"mean {shade}")


class _Measure(NamedTuple):
    """One row of the chart: what it is called, how a value is written, what is drawn and how."""

    name: str
    unit: str
    value: Callable[[RunPoint], float | None]
    write: Callable[[float], str]
    height: float
    stairs: bool


_MEASURES = (
    _Measure("goodput", "samples/s", lambda p: p.goodput, plain, 84, False),
    _Measure("batch size", "samples", lambda p: p.batch_size, amount, 48, True),
    _Measure("efficiency", "", lambda p: p.efficiency, percent, 48, False),
)


def draw_goodput(job: JobRun, index: int, start: float) -> Markup | None:
    """Draw goodput, batch size and efficiency over time, with the job's replicas as steps below.

    None when the job reported none of them at two times or more.
    """
    points = thinned(job.points)
    measures = [m for m in _MEASURES if sum(m.value(p) is not None for p in points) > 1]
    if not measures:
        return None
    x = Scale(*_limits(p.time for p in points), 184.0, WIDTH - RIGHT)
    heights = [m.height for m in measures]
    total = 26 + sum(heights) + 22 * len(heights) + 40
    drawing = Drawing(f"goodput-{index}", total + 38, f"Goodput of {job.name} over time")
    restarts = _restarts(job)
    top = 26.0
    for row, measure in enumerate(measures):
        panel = _measure_panel(drawing, x, top, measure, points)
        _pauses(drawing, panel, job, index)
        if row == 0:
            _poles(drawing, panel, [(time, g) for g, time, _ in restarts], index, "")
        _draw_measure(drawing, panel, measure, points, index)
        top += measure.height + 22
    below = _draw_replicas(drawing, x, top, job, index)
    moments = [m + start for m in clock_ticks(x.low - start, x.high - start, 8)]
    below.draw_x(drawing, moments, lambda v: clock(v - start))
    return drawing.markup()


def _measure_panel(
    drawing: Drawing, x: Scale, top: float, measure: _Measure, points: list[RunPoint]
) -> Panel:
    values = [v for v in map(measure.value, points) if v is not None]
    low, high = padded(values, zero=True)
    if measure.name == "efficiency":
        high = max(1.0, high)
    panel = Panel(x, Scale(low, high, top + measure.height, top))
    marks = ticks(low, high, 2 if measure.height < 60 else 4)
    if measure.name == "efficiency":
        marks = [0.0, 0.5, 1.0]
    panel.draw_y(drawing, marks, measure.write)
    drawing.text(0, top + 12, measure.name, "label strong")
    drawing.text(0, top + 28, measure.unit, "tick")
    return panel


def _draw_measure(
    drawing: Drawing, panel: Panel, measure: _Measure, points: list[RunPoint], colour: int
) -> None:
    if not measure.stairs:
        _curve(drawing, panel, points, lambda p: p.time, measure.value, colour)
        return
    for segment in segments(p for p in points if measure.value(p) is not None):
        pairs = [(p.time, measure.value(p) or 0.0) for p in segment.points]
        drawing.path(panel.staircase(pairs), f"mean {colour_class(colour)}")


def _draw_replicas(drawing: Drawing, x: Scale, top: float, job: JobRun, colour: int) -> Panel:
    """Fill the number of replicas in training over time."""
    most = max((g.num_replicas for g in job.started), default=1)
    panel = Panel(x, Scale(0, max(1, most), top + 40, top))
    panel.draw_y(drawing, whole_ticks(0, most, 2), amount)
    drawing.text(0, top + 12, "replicas", "label strong")
    drawing.text(0, top + 28, "in training", "tick")
    shade = colour_class(colour)
    for generation in job.started:
        if generation.first_step is None:
            continue
        end = generation.stopping or generation.ended or x.high
        left = max(panel.left, x(generation.first_step))
        right = min(panel.right, x(end))
        y = panel.y(generation.num_replicas)
        if right > left:
            drawing.rect(left, y, right - left, panel.bottom - y, f"area {shade}")
            drawing.line(left, y, right, y, f"mean {shade}")
    return panel
