"""Predicted against measured step time, one mark per job and configuration it ran with.

The predictions come from the job's own model of its step time, which it fits to what it measures,
so most of them were made after the configuration had been seen. The first prediction a job made in
a configuration is therefore kept apart: it says what the model knew when the configuration was new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from markupsafe import Markup

from pipollux_sched.report.run.records import JobRun, Run, RunPoint
from pipollux_sched.utils.text import THIN_SPACE, clean, duration, percent, plain

from .axes import Panel, Scale, log_ticks
from .svg import Drawing, colour_class, text_width


class Accuracy(NamedTuple):
    """A configuration a job ran with, and how well its step time was foretold. Times in seconds."""

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
        """Relative error of the median prediction; negative when it was too fast."""
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
"""Configurations that are drawn and listed; the mean error is over all of them."""


def mean_absolute_error(entries: Sequence[Accuracy]) -> float | None:
    """Return the mean over configurations of the size of the relative error."""
    return fmean(abs(e.error) for e in entries) if entries else None


def draw_predictions(entries: Sequence[Accuracy], colours: Mapping[str, int]) -> Markup | None:
    """Draw measured (x) against predicted (y) step time, both logarithmic; None without entries."""
    if not entries:
        return None
    times = [t for e in entries for t in (e.measured, e.predicted, e.first_predicted)]
    low, high = min(times) / 1.35, max(times) * 1.35
    side, left, top = 372.0, 72.0, 30.0
    panel = Panel(
        Scale(low, high, left, left + side, logarithmic=True),
        Scale(low, high, top + side, top, logarithmic=True),
    )
    title = "Predicted against measured step time"
    drawing = Drawing("prediction", top + side + 42, title, width=left + side + 26)
    marks = _spread(log_ticks(low, high), panel)
    _band(drawing, panel, low, high)
    panel.draw_y(drawing, marks, _tick)
    panel.draw_x(drawing, marks, _tick, label="measured step time")
    drawing.text(0, 14, "predicted step time", "axis-label")
    drawing.path(panel.points([(low, low), (high, high)]), "diagonal")
    drawn = entries[:MAX_DRAWN]
    for entry in drawn:
        _draw_entry(drawing, panel, entry, colours[entry.job.name])
    _draw_labels(drawing, panel, drawn)
    return drawing.markup()


def _tick(seconds: float) -> str:
    if seconds < 1:
        return f"{plain(seconds * 1000)}{THIN_SPACE}ms"
    return f"{plain(seconds)}{THIN_SPACE}s"


def _spread(marks: list[float], panel: Panel) -> list[float]:
    """Leave out marks whose labels would touch on the y axis."""
    kept: list[float] = []
    for mark in marks:
        if not kept or panel.y(kept[-1]) - panel.y(mark) > 18:
            kept.append(mark)
    return kept


def _band(drawing: Drawing, panel: Panel, low: float, high: float) -> None:
    """Shade where the prediction is within ten percent."""
    corners = [
        (low * 1.1, low),
        (high, high / 1.1),
        (high, high),
        (high / 1.1, high),
        (low, low * 1.1),
        (low, low),
    ]
    drawing.path(panel.points(corners), "band", closed=True)


def _draw_entry(drawing: Drawing, panel: Panel, entry: Accuracy, colour: int) -> None:
    """Draw a configuration as a dot, its first prediction as a ring on the same vertical."""
    shade = colour_class(colour)
    x, y = panel.x(entry.measured), panel.y(entry.predicted)
    first = panel.y(entry.first_predicted)
    drawing.line(x, first, x, y, f"lead {shade}")
    drawing.circle(x, first, 4.5, f"ring {shade}")
    tip = (
        f"{clean(entry.job.name)}: R = {entry.num_replicas}, atomic batch size {entry.atomic_bsz}, "
        f"{entry.accum_steps} accumulation steps: measured {duration(entry.measured, 3)}, "
        f"predicted {duration(entry.predicted, 3)} ({percent(entry.error)}), "
        f"at first {duration(entry.first_predicted, 3)}"
    )
    drawing.circle(x, y, 6.0, f"mark {shade}", tip=tip)


def label(entry: Accuracy) -> str:
    """Return a configuration as `R × atomic batch size`, with accumulation when there is any."""
    tail = f" × {entry.accum_steps + 1}" if entry.accum_steps else ""
    return f"{entry.num_replicas} × {entry.atomic_bsz}{tail}"


def _draw_labels(drawing: Drawing, panel: Panel, entries: Sequence[Accuracy]) -> None:
    """Write each configuration beside its dot where there is room: right, left, above, below."""
    dots = [(panel.x(e.measured), panel.y(e.predicted)) for e in entries]
    rings = [(panel.x(e.measured), panel.y(e.first_predicted)) for e in entries]
    taken = [(x - 7, y - 7, x + 7, y + 7) for x, y in [*dots, *rings]]
    for (x, y), entry in zip(dots, entries, strict=True):
        words = label(entry)
        width = text_width(words)
        for left, base in (
            (x + 12, y + 5),
            (x - 12 - width, y + 5),
            (x - width / 2, y - 13),
            (x - width / 2, y + 23),
            (x + 12, y + 21),
            (x - 12 - width, y - 11),
        ):
            box = (left, base - 11, left + width, base + 3)
            inside = box[0] > panel.left and box[2] < panel.right and box[1] > panel.top
            if inside and not any(_meet(box, other) for other in taken):
                drawing.text(left, base, words, "label")
                taken.append(box)
                break


def _meet(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
