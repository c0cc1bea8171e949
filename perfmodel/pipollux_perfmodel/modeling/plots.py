"""Plots of fits and predictions, rendered by matplotlib without a display.

The same data give the same bytes: the plots use matplotlib's defaults regardless of the user's
settings, and contain no dates or random names.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

from pipollux_perfmodel import GoodputFunction

from .fitting import StageFit
from .measurements import Measurement
from .prediction import Answer
from .stage_model import Prediction

ACCUMULATION = "accumulation steps"
REGIMES = (ACCUMULATION, "one replica", "one node", "two nodes", "three or more nodes")
"""Regimes of step times, with the names of the fit's report."""
_MARKERS = dict(zip(REGIMES, ("o", "s", "^", "D", "P"), strict=True))
# Okabe and Ito's colours, distinguishable with any colour vision.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARGIN = 1.25
_WITHIN = 0.1


class RegimePoint(NamedTuple):
    """One measured time and its prediction, in seconds."""

    regime: str
    micro_bsz: float
    measured: float
    predicted: float
    outlier: bool


def points(fit: StageFit) -> list[RegimePoint]:
    """Return two points per row, its accumulation step and its optimizer step, in order of rows."""
    # Step times depend on neither the gradient nor the initial batch size.
    model = GoodputFunction(fit.perf_params, (0.0, 1.0), 1)
    outliers = set(fit.report.outliers)
    found = []
    for index, row in enumerate(fit.rows):
        one = row.measurement
        times = model.step_time(
            one.num_nodes, one.num_replicas, one.atomic_bsz, 0, one.num_microbatches
        )
        for regime, measured, predicted in (
            (ACCUMULATION, one.accum_step_time, times.accum_time),
            (_regime(one), one.optim_step_time, times.optim_time),
        ):
            found.append(
                RegimePoint(regime, one.micro_bsz, measured, float(predicted), index in outliers)
            )
    return found


def draw_fit(fits: Sequence[StageFit], form: str = "png") -> bytes:
    """Draw measured against predicted step times: one panel per number of stages, at least one.
    Shapes are the regimes, colours the samples of a micro-batch, and red circles the outliers.
    """
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(5.2 * len(fits) + 1.0, 5.0), layout="constrained")
        grid = figure.subplots(1, len(fits), squeeze=False)[0]
        sizes = [row.measurement.micro_bsz for fit in fits for row in fit.rows]
        smallest, largest = min(sizes), max(sizes)
        colours = LogNorm(smallest / 1.01, largest * 1.01)
        for axes, fit in zip(grid, fits, strict=True):
            drawn = _fit_panel(axes, fit, colours)
        bar = figure.colorbar(drawn, ax=list(grid), label="samples per micro-batch")
        ticks = sorted(set(sizes)) if len(set(sizes)) <= 8 else _powers(smallest, largest)
        bar.set_ticks(ticks, labels=[f"{size:g}" for size in ticks])
        bar.ax.minorticks_off()
        return _render(figure, form)


def draw_answer(answer: Answer, form: str = "png") -> bytes:
    """Draw predictions over the number of GPUs: samples per second, and speedup over replicas."""
    by_stages: dict[str, list[Prediction]] = {}
    for one in answer.predictions:
        if one.feasible:
            label = _label(one, by_schedule=answer.schedules_asked)
            by_stages.setdefault(label, []).append(one)
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(11.0, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for index, (label, rows) in enumerate(by_stages.items()):
            colour = _COLOURS[index % len(_COLOURS)]
            _answer_lines(left, right, rows, label, colour)
        _finish_answer(left, right, answer)
        return _render(figure, form)


def _regime(one: Measurement) -> str:
    if one.num_replicas == 1:
        return "one replica"
    return {1: "one node", 2: "two nodes"}.get(one.num_nodes, "three or more nodes")


def _fit_panel(axes: Axes, fit: StageFit, colours: LogNorm) -> Any:
    found = points(fit)
    drawn = None
    for regime, marker in _MARKERS.items():
        here = [point for point in found if point.regime == regime]
        if here:
            drawn = axes.scatter(
                [point.measured for point in here],
                [point.predicted for point in here],
                c=[point.micro_bsz for point in here],
                norm=colours,
                cmap="viridis",
                marker=marker,
                s=42,
                linewidths=0.6,
                edgecolors="black",
                label=_regime_label(fit, regime),
                zorder=3,
            )
    outlying = [point for point in found if point.outlier]
    if outlying:
        axes.scatter(
            [point.measured for point in outlying],
            [point.predicted for point in outlying],
            s=160,
            facecolors="none",
            edgecolors="#d62728",
            linewidths=1.4,
            label=f"outliers ({len(fit.outliers)} rows)",
            zorder=4,
        )
    _finish_fit(axes, fit, found)
    return drawn


def _finish_fit(axes: Axes, fit: StageFit, found: Sequence[RegimePoint]) -> None:
    times = [time for point in found for time in (point.measured, point.predicted)]
    ends = np.array((min(times) / _MARGIN, max(times) * _MARGIN))
    axes.fill_between(
        ends, ends * (1 - _WITHIN), ends * (1 + _WITHIN), color="0.9", label="within 10 %", zorder=1
    )
    axes.plot(ends, ends, color="0.5", linewidth=1.0, zorder=2)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(EngFormatter(unit="s"))
        axis.set_minor_locator(NullLocator())
        axis.set_tick_params(labelsize=8)
    axes.set_xlabel("measured step time")
    axes.set_ylabel("predicted step time")
    axes.set_title(_stages(fit.num_stages))
    axes.grid(True, which="major", color="0.92", zorder=0)
    axes.legend(loc="upper left", fontsize=8)


def _regime_label(fit: StageFit, regime: str) -> str:
    error = next(one.mean_error for one in fit.report.regimes if one.name == regime)
    kind = regime if regime == ACCUMULATION else f"optimizer steps, {regime}"
    return f"{kind}: off by {100 * error:.1f} %"


def _answer_lines(
    left: Axes, right: Axes, rows: Sequence[Prediction], label: str, colour: str
) -> None:
    gpus = [one.num_gpus for one in rows]
    style: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 4, "label": label}
    goodput = [one.goodput for one in rows if one.goodput is not None]
    throughput = [one.throughput for one in rows]
    left.plot(gpus, goodput or throughput, **style)
    if goodput:
        left.plot(gpus, throughput, color=colour, linestyle=":", linewidth=1)
    right.plot([one.num_replicas for one in rows], [one.speedup for one in rows], **style)


def _finish_answer(left: Axes, right: Axes, answer: Answer) -> None:
    replicas = sorted({one.num_replicas for one in answer.predictions})
    right.plot(
        (replicas[0], replicas[-1]),
        (replicas[0], replicas[-1]),
        color="0.6",
        linestyle="--",
        linewidth=1.0,
        label="ideal",
        zorder=1,
    )
    if answer.efficiency_known:
        left.plot([], [], color="0.4", linestyle=":", linewidth=1, label="throughput")
    left.set_xlabel("GPUs")
    left.set_ylabel("samples per second")
    left.set_title("Goodput" if answer.efficiency_known else "Throughput")
    right.set_xlabel("replicas")
    right.set_ylabel("times one replica of the same stages")
    right.set_title("Speedup")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(True, color="0.92")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper left", fontsize=8)


def _label(one: Prediction, *, by_schedule: bool) -> str:
    named = by_schedule and one.num_stages > 1
    stages = _stages(one.num_stages) + (f" by {one.schedule}" if named else "")
    if one.measured:
        return stages
    return stages + (" (from layers)" if one.from_layers else " (not measured)")


def _stages(num_stages: int) -> str:
    return "1 stage" if num_stages == 1 else f"{num_stages} stages"


def _powers(smallest: float, largest: float) -> list[float]:
    exponents = range(int(np.ceil(np.log2(smallest))), int(np.floor(np.log2(largest))) + 1)
    step = max(1, len(exponents) // 8)
    return [2.0**exponent for exponent in exponents[::step]] or [smallest]


def _render(figure: Figure, form: str) -> bytes:
    """Return the picture's bytes, without metadata that differs between runs."""
    nothing: dict[str, dict[str, Any]] = {
        "png": {"Software": None},
        "svg": {"Date": None},
        "pdf": {"CreationDate": None},
    }
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "pipollux", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=form, dpi=120, metadata=nothing[form])
    return buffer.getvalue()
