"""Curves of policies: completion times, unfinished jobs, slots held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

from pipollux_sched.report.charts.specs import Axis, CurveChart, Line, Panel, moments
from pipollux_simulator.engine.outcome import SimulationOutcome
from pipollux_utils.text import clean, count

Step = tuple[float, float]
"""The time from which a value holds, and the value."""


def completion_curve(outcome: SimulationOutcome) -> list[Step]:
    """Return (JCT, share of jobs with at most this JCT), rising to 1."""
    jcts = sorted(job.jct for job in outcome.jobs)
    return [(jct, (index + 1) / len(jcts)) for index, jct in enumerate(jcts)]


def slots_held(outcome: SimulationOutcome) -> list[Step]:
    """Return (seconds, slots held from then on)."""
    return _totals(
        (moment, sign * len(hold.nodes) * hold.num_stages)
        for job in outcome.jobs
        for hold in job.history
        for moment, sign in ((hold.start, 1), (hold.end, -1))
    )


def jobs_unfinished(outcome: SimulationOutcome) -> list[Step]:
    """Return (seconds, jobs that have arrived and are not complete from then on)."""
    return _totals(
        (moment, sign)
        for job in outcome.jobs
        for moment, sign in ((job.arrived, 1), (job.completed, -1))
    )


def completion_chart(outcomes: Sequence[SimulationOutcome]) -> CurveChart:
    """Return the share of jobs completed within a time, with a curve per policy."""
    curves = [completion_curve(outcome) for outcome in outcomes]
    low = min(curve[0][0] for curve in curves)
    high = max(curve[-1][0] for curve in curves)
    low, high = (low, high) if high > low else (low / 2, high * 2)
    ended = [[(low, 0.0), *curve, (high, 1.0)] for curve in curves]
    panel = Panel("share of jobs", "share of jobs", "share", 300, _lines(outcomes, ended), high=1.0)
    axis = Axis("length", low, high, "from arrival to completion", log=True)
    return CurveChart("Share of jobs done within a time, by policy", axis, [panel])


def use_chart(outcomes: Sequence[SimulationOutcome]) -> CurveChart:
    """Return slots held, and below unfinished jobs, over time, with a curve per policy."""
    begin = min(outcome.begin for outcome in outcomes)
    end = max(outcome.end for outcome in outcomes)
    slots = max(sum(outcome.slots.values()) for outcome in outcomes)
    held = _lines(outcomes, map(slots_held, outcomes), begin)
    unfinished = _lines(outcomes, map(jobs_unfinished, outcomes), begin)
    panels = [
        Panel("GPUs held", f"GPUs held, of {slots}", "whole", 170, held, "GPUs", high=slots),
        Panel("jobs unfinished", "jobs unfinished", "whole", 200, unfinished, "jobs", high=1),
    ]
    axis = Axis("elapsed", 0.0, round(end - begin, 2), "time")
    return CurveChart(f"Use of {count(slots, 'GPU')} over time, by policy", axis, panels)


def _lines(
    outcomes: Sequence[SimulationOutcome], curves: Iterable[Sequence[Step]], begin: float = 0.0
) -> list[Line]:
    return [
        Line(clean(outcome.policy), [moments(curve, begin)], "step", number)
        for number, (outcome, curve) in enumerate(zip(outcomes, curves, strict=True))
    ]


def _totals(changes: Iterable[tuple[float, int]]) -> list[Step]:
    net: Counter[float] = Counter()
    for moment, change in changes:
        net[moment] += change
    kept = [(moment, change) for moment, change in sorted(net.items()) if change]
    return list(zip((m for m, _ in kept), accumulate(c for _, c in kept), strict=True))
