"""Scalars for TensorBoard: loss, goodput and batch size over all restarts of a job.

The reporting thread writes at most about four points per second. A restarted job continues the run:
steps that it repeats after a crash replace the earlier records.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pipollux_hybrid.errors import ConfigurationError

from .step_record import StepRecord

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


__all__ = ["ScalarWriter"]

FLUSH_SECONDS = 10


class ScalarWriter:
    """Writes scalars of this job's steps; :class:`~pipollux_hybrid.TensorBoard` has their names.
    Raises a ConfigurationError if ``tensorboard`` is not installed.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigurationError(
                f"scalars are to be written to {os.fspath(log_dir)!r}, but tensorboard is not "
                "installed: run `pip install tensorboard`, or unset PIPOLLUX_TENSORBOARD_DIR"
            )
        self._log_dir = Path(log_dir)
        self._writer: SummaryWriter | None = None

    def on_step(self, point: StepRecord) -> None:
        """Write a point; called by the reporting thread."""
        if self._writer is None:
            self._writer = self._open(point.step)
        for name, value in _scalars(point).items():
            if value is not None:
                self._writer.add_scalar(name, value, point.step, walltime=point.time)

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, step: int) -> SummaryWriter:
        # Importing takes about a second, which the reporting thread spends.
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._log_dir), purge_step=step, flush_secs=FLUSH_SECONDS)


def _scalars(point: StepRecord) -> dict[str, float | None]:
    return {
        "loss": point.loss,
        "throughput": point.throughput,
        "goodput": point.goodput,
        "efficiency": point.efficiency,
        "batch_size/global": point.batch_size,
        "batch_size/atomic": point.atomic_bsz,
        "microbatches": point.num_microbatches,
        "replicas": point.num_replicas,
        "noise_scale": point.noise_scale,
        "learning_rate_factor": point.rate_factor,
        "step_time": point.step_time,
        "step_time_predicted": point.predicted_step_time,
        "epoch": point.epoch,
    }
