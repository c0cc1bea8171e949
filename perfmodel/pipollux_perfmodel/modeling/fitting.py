"""Fits of the performance model to measurements: one per number of stages.

Other numbers of stages consist of other layers, so measurements with two do not determine four.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipollux_perfmodel import FitReport, PerfParams, fit_measurements
from pipollux_perfmodel.timing.params import Checkpoint, ScheduleKind

from .errors import ModelingError
from .measurements import MeasurementRow


class StageFit(NamedTuple):
    """The fit for one number of stages."""

    rows: tuple[MeasurementRow, ...]
    perf_params: PerfParams
    report: FitReport
    """Errors and assumptions of the fit; its outliers are indices into `rows`."""

    @property
    def num_stages(self) -> int:
        """K."""
        return self.perf_params.num_stages

    @property
    def timed(self) -> bool:
        """Whether any row has stage times; without them, shares are assumed."""
        return any(row.measurement.forward for row in self.rows)

    @property
    def outliers(self) -> tuple[MeasurementRow, ...]:
        """Rows with large errors while the others have small ones."""
        return tuple(self.rows[index] for index in self.report.outliers)


def fit_rows(
    rows: Sequence[MeasurementRow],
    checkpoint: Checkpoint = "never",
    schedule: ScheduleKind = "gpipe",
    chunks_per_stage: int = 1,
) -> tuple[StageFit, ...]:
    """Fit the model to measurements, at least one row; fits are ordered by number of stages.

    `schedule` is irrelevant for one stage. Raises ModelingError if the fit rejects the
    measurements.
    """
    numbers = sorted({row.measurement.num_stages for row in rows})
    return tuple(
        _fit(
            tuple(row for row in rows if row.measurement.num_stages == number),
            checkpoint=checkpoint,
            schedule=schedule if number > 1 else "gpipe",
            chunks_per_stage=chunks_per_stage if number > 1 else 1,
        )
        for number in numbers
    )


def _fit(rows: tuple[MeasurementRow, ...], **run: Any) -> StageFit:
    measured = [row.measurement for row in rows]
    num_stages = measured[0].num_stages
    timed = any(one.forward for one in measured)
    try:
        result = fit_measurements(
            [one.num_nodes for one in measured],
            [one.num_replicas for one in measured],
            [one.atomic_bsz for one in measured],
            [one.accum_step_time for one in measured],
            [one.optim_step_time for one in measured],
            num_microbatches=[one.num_microbatches for one in measured],
            forward=_stages([one.forward for one in measured], num_stages) if timed else None,
            backward=_stages([one.backward for one in measured], num_stages) if timed else None,
            num_stages=num_stages,
            **run,
        )
    except ValueError as error:
        raise ModelingError(f"rows of {num_stages} stages cannot be fitted: {error}") from error
    return StageFit(rows, result.perf_params, result.report)


def _stages(times: Sequence[tuple[float, ...] | None], num_stages: int) -> NDArray[np.float64]:
    return np.array([one or (np.nan,) * num_stages for one in times])
