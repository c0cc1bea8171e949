"""Policies as curves: how soon jobs were done, how many waited or ran, what they held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from markupsafe import Markup

from pipollux_sched.report.charts.axes import Panel, Scale, clock_ticks, whole_ticks
from pipollux_sched.report.charts.svg import WIDTH, Drawing, colour_class
from pipollux_sched.simulator.engine.outcome import SimulationOutcome
from pipollux_sched.utils.text import clock, count, duration, percent

_LEFT, _RIGHT = 64.0, 16.0
_CLEARANCE = 84.0
"""Units between two marks of a logarithmic axis, so that their labels stay apart."""
_HOUR = 3600.0
_MOMENTS = (
    *(1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
    *(n * _HOUR for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
)

Step = tuple[float, float]
"""From when on a value holds."""


def completion_curve(outcome: SimulationOutcome) -> list[Step]:
    """Return (JCT, share of jobs done in no more), rising to 1."""
    jcts = sorted(job.jct for job in outcome.jobs)
    return [(jct, (index + 1) / len(jcts)) for index, jct in enumerate(jcts)]


def slots_held(outcome: SimulationOutcome) -> list[Step]:
    """Return (seconds, slots that jobs hold from then on)."""
    return _totals(
        (moment, sign * len(hold.nodes) * hold.num_stages)
        for job in outcome.jobs
        for hold in job.history
        for moment, sign in ((hold.start, 1), (hold.end, -1))
    )


def jobs_unfinished(outcome: SimulationOutcome) -> list[Step]:
    """Return (seconds, jobs that have arrived and are not done from then on)."""
    return _totals(
        (moment, sign)
        for job in outcome.jobs
        for moment, sign in ((job.arrived, 1), (job.completed, -1))
    )


def draw_completion_times(outcomes: Sequence[SimulationOutcome], name: str) -> Markup:
    """Draw the share of jobs done within a time, a curve for every policy.

    Args:
        outcomes: of one workload.
        name: of the drawing, unique in the page.
    """
    curves = [completion_curve(outcome) for outcome in outcomes]
    low = min(curve[0][0] for curve in curves)
    high = max(curve[-1][0] for curve in curves)
    low, high = (low, high) if high > low else (low / 2, high * 2)
    top, bottom = 30.0, 330.0
    drawing = Drawing(name, bottom + 42, "Share of jobs done within a time, by policy")
    x = Scale(low, high, _LEFT, WIDTH - _RIGHT, logarithmic=True)
    panel = Panel(x, Scale(0.0, 1.0, bottom, top))
    drawing.text(0, top - 12, "share of jobs", "axis-label")
    panel.draw_y(drawing, (0.0, 0.25, 0.5, 0.75, 1.0), percent)
    panel.draw_x(drawing, _apart(x), _length, label="from arrival to completion")
    for index, curve in enumerate(curves):
        steps = [(low, 0.0), *curve, (high, 1.0)]
        drawing.path(panel.staircase(steps), f"mean {colour_class(index)}")
    return drawing.markup()


def draw_use(outcomes: Sequence[SimulationOutcome], name: str) -> Markup:
    """Draw slots held, and below unfinished jobs, over time, a curve for every policy.

    Args:
        outcomes: of one workload.
        name: of the drawing, unique in the page.
    """
    begin = min(outcome.begin for outcome in outcomes)
    x = Scale(begin, max(outcome.end for outcome in outcomes), _LEFT, WIDTH - _RIGHT)
    slots = max(sum(outcome.slots.values()) for outcome in outcomes)
    rows = (
        _Row(f"GPUs held, of {slots}", [slots_held(one) for one in outcomes], 30.0, slots),
        _Row("jobs unfinished", [jobs_unfinished(one) for one in outcomes], 250.0, 1),
    )
    drawing = Drawing(name, 450 + 42, f"Use of {count(slots, 'GPU')} over time, by policy")
    for row in rows:
        panel = _draw_row(drawing, x, row)
    marks = [mark + begin for mark in clock_ticks(0.0, x.high - begin)]
    panel.draw_x(drawing, marks, lambda moment: clock(moment - begin), label="time")
    return drawing.markup()


class _Row(NamedTuple):
    title: str
    curves: list[list[Step]]
    top: float
    least: float
    """What the axis reaches to at least."""


def _draw_row(drawing: Drawing, x: Scale, row: _Row) -> Panel:
    most = max(row.least, *(value for curve in row.curves for _, value in curve))
    bottom = row.top + (170.0 if row.top < 100 else 200.0)
    panel = Panel(x, Scale(0.0, most, bottom, row.top))
    drawing.text(0, row.top - 12, row.title, "axis-label")
    panel.draw_y(drawing, whole_ticks(0, most))
    for index, curve in enumerate(row.curves):
        drawing.path(panel.staircase(curve), f"mean {colour_class(index)}")
    return panel


def _apart(x: Scale) -> list[float]:
    """Return round times of a logarithmic axis whose labels do not touch."""
    marks: list[float] = []
    for moment in _MOMENTS:
        if x.low <= moment <= x.high and (not marks or x(moment) - x(marks[-1]) > _CLEARANCE):
            marks.append(moment)
    return marks


def _length(seconds: float) -> str:
    """Write a round time, in whole hours from one hour on."""
    return f"{seconds / _HOUR:g} h" if seconds >= _HOUR else duration(seconds)


def _totals(changes: Iterable[tuple[float, int]]) -> list[Step]:
    """Sum changes up; what changes at one moment counts as one change."""
    net: Counter[float] = Counter()
    for moment, change in changes:
        net[moment] += change
    kept = [(moment, change) for moment, change in sorted(net.items()) if change]
    return list(zip((m for m, _ in kept), accumulate(c for _, c in kept), strict=True))
