"""Reports of the script: its loss, and the TensorBoard directory."""

from __future__ import annotations

import os

from torch import Tensor

from pipollux_hybrid.job.context import context

from .metrics import Metrics
from .tensorboard import ScalarWriter


def report(*, loss: Tensor | float) -> None:
    """Report the mean loss of the current batch.

    The losses of replicas are averaged by samples once per step, and shown by the scheduler.

    Args:
        loss: The mean loss of this replica's batch; its graph is released immediately.
    """
    context().component(Metrics).note_loss(
        loss.detach() if isinstance(loss, Tensor) else float(loss)
    )


class TensorBoard(ScalarWriter):
    """Writes scalars of this job's steps on rank 0; other ranks do nothing.

    ``PIPOLLUX_TENSORBOARD_DIR`` does the same without a change of the script.

    Example::

        pipollux.TensorBoard("runs/my-model")   # then: tensorboard --logdir runs

    The scalars are ``loss``, ``throughput`` and ``goodput`` (samples per second), ``efficiency``,
    ``batch_size/global``, ``batch_size/atomic``, ``microbatches``, ``replicas``, ``noise_scale``
    (samples), ``learning_rate_factor``, ``step_time`` and ``step_time_predicted`` (seconds),
    ``epoch``; the step is the optimizer step of the whole training.

    Args:
        log_dir: Directory of the run.

    Raises:
        ConfigurationError: ``tensorboard`` is not installed.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        super().__init__(log_dir)
        context().component(Metrics).reporter.listen(self)
