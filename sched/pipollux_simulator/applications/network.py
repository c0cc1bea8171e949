"""Applications on a network whose higher levels are slower.

The applications' own step times are those of nodes that meet at level 1, such as a rack. At a
higher level the part of an optimizer step that synchronizes gradients takes longer by a factor:

    optim(level) = accum + factor(level) · (optim − accum)
"""

from __future__ import annotations

from collections.abc import Sequence

from pipollux_perfmodel import GradParams

from .base import Application, JobModel, RunningJob, TrueStepTimes


class SlowerNetwork:
    """An application on such a network; `slowdowns` are the factors of level 2, 3, …."""

    def __init__(self, app: Application, slowdowns: Sequence[float]) -> None:
        self._app, self._factors = app, (1.0, *slowdowns)
        self.name = app.name
        self.init_batch_size, self.max_batch_size = app.init_batch_size, app.max_batch_size
        self.max_epochs = app.max_epochs

    def step_times(self, running: RunningJob) -> TrueStepTimes:
        """Return the true step times at the job's network level."""
        optim, accum = self._app.step_times(running)
        level = running.level if running.num_nodes > 1 else 1
        factor = self._factors[min(level, len(self._factors)) - 1]
        if factor == 1.0:
            return TrueStepTimes(optim, accum)
        return TrueStepTimes(accum + factor * max(optim - accum, 0.0), accum)

    def gradients(self, batch_size: int, epoch: int) -> GradParams:
        """Return the true squared norm and variance of gradients in an epoch."""
        return self._app.gradients(batch_size, epoch)

    def progress(self, epoch: int) -> float:
        """Return the progress at the end of epochs, in iterations at the initial batch."""
        return self._app.progress(epoch)

    def completion_epoch(self, batch_size: int) -> int:
        """Return the last epoch of a job."""
        return self._app.completion_epoch(batch_size)

    def max_replicas(self, batch_size: int | None = None) -> int:
        """Return the maximum replicas that can share a batch."""
        return self._app.max_replicas(batch_size)

    def new_model(self, batch_size: int | None = None) -> JobModel:
        """Return the model of a new job."""
        return self._app.new_model(batch_size)
