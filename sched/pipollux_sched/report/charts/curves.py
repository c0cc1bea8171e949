"""Curves of a job over restarts and elastic resizes: loss, goodput, batch size and replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, pairwise
from typing import Literal

from pipollux_sched.report.run.records import Attempt, JobRun, RunPoint
from pipollux_utils.text import amount, clean

from .specs import Axis, CurveChart, Line, Mark, Panel, Point, moments

MAX_POINTS = 1500
"""Reports drawn per curve; a curve with more is thinned evenly, so that the page stays small."""


def thinned(points: Sequence[RunPoint], most: int = MAX_POINTS) -> list[RunPoint]:
    """Return at most about `most` of the points, evenly spaced, always with the last one."""
    stride = math.ceil(len(points) / most) if points else 1
    kept = list(points[::stride])
    if points and kept[-1] is not points[-1]:
        kept.append(points[-1])
    return kept


def _pieces(
    points: Iterable[RunPoint],
    at: Callable[[RunPoint], float],
    value: Callable[[RunPoint], float | None],
) -> list[list[Point]]:
    known = [point for point in points if value(point) is not None]
    parts = groupby(known, key=lambda point: point.attempt)
    return [moments((at(p), value(p)) for p in part) for _, part in parts]


def _later(job: JobRun) -> list[tuple[Attempt, float, int]]:
    """Return the time and step at which each later membership started training."""
    trained = [
        (g, g.first_step, g.first_step_number)
        for g in job.started
        if g.first_step is not None and g.first_step_number is not None
    ]
    return [(g, time, step) for g, time, step in trained[1:] if time is not None]


def _marks(job: JobRun, start: float) -> list[Mark]:
    return [_mark(attempt, round(time - start, 2)) for attempt, time, _ in _later(job)]


def _mark(attempt: Attempt, at: float, more: str = "") -> Mark:
    flag = f"R = {attempt.num_replicas}{more}"
    return Mark(at, attempt.title, flag, elastic=attempt.elastic or None)


def _pauses(job: JobRun, start: float) -> list[tuple[float, float]]:
    """Return the intervals in which the job held slots or waited for them, but did not train."""
    trained = [g for g in job.started if g.first_step is not None]
    found = []
    for before, after in pairwise(trained):
        begin = before.stopping or before.ended
        if begin is not None and after.first_step is not None and after.first_step > begin:
            found.append((round(begin - start, 2), round(after.first_step - start, 2)))
    return found


def loss_charts(job: JobRun, colour: int, start: float) -> tuple[CurveChart, ...]:
    """Return a job's loss by step and by time; empty if it reported fewer than two losses."""
    points = [p for p in job.points if p.loss is not None]
    if len(points) < 2:
        return ()
    points = thinned(points)
    by_step = CurveChart(
        title=f"Loss of {clean(job.name)} by step",
        x=_axis("whole", (p.step for p in points), "step"),
        panels=[_loss_panel(_pieces(points, lambda p: p.step, lambda p: p.loss))],
        marks=[
            _mark(attempt, step, f" from step {amount(step)}") for attempt, _, step in _later(job)
        ],
        colour=colour,
    )
    by_time = CurveChart(
        title=f"Loss of {clean(job.name)} by time",
        x=_axis("elapsed", (p.time - start for p in points), "time"),
        panels=[_loss_panel(_pieces(points, lambda p: p.time - start, lambda p: p.loss))],
        bands=_pauses(job, start),
        marks=_marks(job, start),
        colour=colour,
    )
    return by_step, by_time


def _loss_panel(pieces: list[list[Point]]) -> Panel:
    line = Line("loss", pieces)
    return Panel("loss", "loss", "number", 184, [line], zero=False, smooth=True)


def _axis(
    kind: Literal["elapsed", "whole"], values: Iterable[float], name: str | None = None
) -> Axis:
    known = [value for value in values if math.isfinite(value)] or [0.0]
    return Axis(kind, round(min(known), 2), round(max(known), 2), name)


def goodput_chart(job: JobRun, colour: int, start: float) -> CurveChart | None:
    """Return goodput, batch size and efficiency over time, above replicas; None without reports."""
    points = thinned(job.points)

    def pieces(value: Callable[[RunPoint], float | None]) -> list[list[Point]]:
        return _pieces(points, lambda p: p.time - start, value)

    goodput = Line("goodput", pieces(lambda p: p.goodput))
    batch = Line("batch size", [_changes(p) for p in pieces(lambda p: p.batch_size)], "step")
    efficiency = Line("efficiency", pieces(lambda p: p.efficiency))
    unit = "samples/s"
    panels = [
        Panel("goodput", f"goodput, {unit}", "number", 84, [goodput], unit, smooth=True),
        Panel("batch size", "batch size, samples", "whole", 48, [batch], "samples"),
        Panel("efficiency", "efficiency", "share", 48, [efficiency], smooth=True, high=1.0),
    ]
    panels = [one for one in panels if sum(map(len, one.lines[0].pieces)) > 1]
    if not panels:
        return None
    x = _axis("elapsed", (p.time - start for p in points), "time")
    replicas = Line("replicas", _replicas(job, start, x), "area")
    return CurveChart(
        title=f"Goodput of {clean(job.name)} over time",
        x=x,
        panels=[*panels, Panel("replicas", "replicas in training", "whole", 40, [replicas])],
        bands=_pauses(job, start),
        marks=_marks(job, start),
        colour=colour,
    )


def _changes(piece: Sequence[Point]) -> list[Point]:
    """Drop the points of a step curve at which nothing changes, except the last."""
    kept = [b for a, b in pairwise(piece) if a[1] != b[1]]
    return [*piece[:1], *kept, *(piece[-1:] if len(piece) > 1 and kept[-1:] != [piece[-1]] else [])]


def _replicas(job: JobRun, start: float, x: Axis) -> list[list[Point]]:
    """Return the number of replicas in training over time, one piece per membership."""
    found = []
    for attempt in job.started:
        if attempt.first_step is None:
            continue
        end = attempt.stopping or attempt.ended
        left = max(x.low, round(attempt.first_step - start, 2))
        right = x.high if end is None else min(x.high, round(end - start, 2))
        if right > left:
            replicas = float(attempt.num_replicas)
            found.append([(left, replicas), (right, replicas)])
    return found
