"""Predicted against measured step time, one mark per job and configuration it ran with.

The predictions come from the job's own model, which is fitted to its measurements, so most of them
were made after the configuration had been measured. The first one in a configuration is kept
separately: it shows the accuracy for a new configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from pipollux_sched.report.run.records import JobRun, Run, RunPoint
from pipollux_utils.text import clean, duration, percent

from .specs import Dot, ScatterChart, Tip


class Accuracy(NamedTuple):
    """A configuration a job ran with, and the accuracy of its predictions. Times in seconds."""

    job: JobRun
    num_replicas: int
    atomic_bsz: int
    accum_steps: int
    num_reports: int
    measured: float
    predicted: float
    first_predicted: float

    @property
    def error(self) -> float:
        """Relative error of the median prediction; negative if it was too fast."""
        return self.predicted / self.measured - 1

    @property
    def first_error(self) -> float:
        """Relative error of the first prediction made in this configuration."""
        return self.first_predicted / self.measured - 1


def accuracies(run: Run) -> list[Accuracy]:
    """Return every job's configurations that have a measured and a predicted step time."""
    return [entry for job in run.jobs.values() for entry in _of_job(job)]


def _of_job(job: JobRun) -> list[Accuracy]:
    groups: dict[tuple[int, int, int], list[RunPoint]] = {}
    for point in job.points:
        key = (point.num_replicas or 0, point.atomic_bsz or 0, point.accum_steps or 0)
        if point.step_time and point.step_time > 0 and key[0] and key[1]:
            groups.setdefault(key, []).append(point)
    out = []
    for key, points in sorted(groups.items()):
        foretold = [p.predicted_step_time for p in points if p.predicted_step_time]
        if foretold and min(foretold) > 0:
            measured = median([p.step_time or 0.0 for p in points])
            out.append(Accuracy(job, *key, len(points), measured, median(foretold), foretold[0]))
    return out


MAX_DRAWN = 200
"""Number of configurations drawn and listed; the mean error is over all of them."""


def mean_absolute_error(entries: Sequence[Accuracy]) -> float | None:
    """Return the mean absolute relative error over configurations."""
    return fmean(abs(e.error) for e in entries) if entries else None


def prediction_chart(
    entries: Sequence[Accuracy], colours: Mapping[str, int]
) -> ScatterChart | None:
    """Return measured (x) against predicted (y) step time; None without entries."""
    if not entries:
        return None
    return ScatterChart(
        title="Predicted against measured step time",
        name=("measured step time", "predicted step time"),
        points=[
            Dot(
                entry.measured,
                entry.predicted,
                entry.first_predicted,
                colours[entry.job.name],
                label(entry),
                _tip(entry),
            )
            for entry in entries[:MAX_DRAWN]
        ],
    )


def _tip(entry: Accuracy) -> Tip:
    return (
        clean(entry.job.name),
        ("replicas", str(entry.num_replicas)),
        ("atomic batch size", str(entry.atomic_bsz)),
        ("accumulation steps", str(entry.accum_steps)),
        ("measured", duration(entry.measured, 3)),
        ("predicted", f"{duration(entry.predicted, 3)} ({percent(entry.error)})"),
        ("at first", duration(entry.first_predicted, 3)),
    )


def label(entry: Accuracy) -> str:
    """Return a configuration as `R × atomic batch size`, with accumulation if there is any."""
    tail = f" × {entry.accum_steps + 1}" if entry.accum_steps else ""
    return f"{entry.num_replicas} × {entry.atomic_bsz}{tail}"
