"""Measured beside predicted step times, by regime: what of a step's time was at work.

Every row is two points: its accumulation step, and its optimizer step in the regime of where the
replicas lay. The names are those of the fit's own report.
"""

from __future__ import annotations

from typing import NamedTuple

from pipollux_perfmodel import GoodputFunction

from .fitting import StageFit
from .measurements import Measurement

ACCUMULATION = "accumulation steps"
REGIMES = (ACCUMULATION, "one replica", "one node", "two nodes", "three or more nodes")


class RegimePoint(NamedTuple):
    """One measured time and its prediction, in seconds."""

    regime: str
    """One of `REGIMES`."""
    micro_bsz: float
    """Samples of a micro-batch."""
    measured: float
    predicted: float
    outlier: bool
    """Whether the fit counts its row as an outlier."""


def points(fit: StageFit) -> list[RegimePoint]:
    """Return the points of a fit, two for each of its rows, in their order."""
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


def _regime(one: Measurement) -> str:
    if one.num_replicas == 1:
        return "one replica"
    return {1: "one node", 2: "two nodes"}.get(one.num_nodes, "three or more nodes")
