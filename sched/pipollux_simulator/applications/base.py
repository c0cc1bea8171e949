"""Interfaces of an application: how its jobs really train, and what they know of it.

An `Application` is the truth: how long an iteration takes on a placement, how noisy gradients are,
how far a job has to train. A `JobModel` is what ONE job has learnt: it sees the step times of the
configurations that the job ran in, and its gradients, and predicts the rest. Policies see only the
model, as in a real cluster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pipollux_perfmodel import GradParams, StepTime
from pipollux_policies import ReplicaShape

_TOLERANCE = 0.04


@dataclass(frozen=True)
class RunningJob:
    """How a job runs: where its replicas lie, and the sizes it chose."""

    placement: tuple[int, ...]
    """Number of replicas on each of its nodes, none of them 0."""
    num_stages: int = 1
    """K."""
    num_microbatches: int = 1
    """M."""
    atomic_bsz: int = 0
    """Samples per replica in one forward and backward."""
    accum_steps: int = 0
    """Accumulation steps before each optimizer step."""
    gpu_type: str = ""
    """Type of the GPUs of its nodes."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.placement)

    @property
    def num_replicas(self) -> int:
        """R."""
        return sum(self.placement)

    @property
    def batch_size(self) -> int:
        """R · atomic_bsz · (accum_steps + 1)."""
        return self.num_replicas * self.atomic_bsz * (self.accum_steps + 1)


class TrueStepTimes(NamedTuple):
    """True times of one forward and backward, in seconds."""

    optim_step: float
    """With synchronisation and the optimizer's step."""
    accum_step: float
    """Without."""

    def differ(self, predicted: StepTime) -> bool:
        """Return whether either is more than 4 % off its prediction: then a model is refitted."""
        pairs = (predicted.optim_time, self.optim_step), (predicted.accum_time, self.accum_step)
        return any(abs(math.log(guess / seen)) > _TOLERANCE for guess, seen in pairs)


class JobModel(Protocol):
    """What one job has learnt of itself, and reports to the scheduler."""

    @property
    def max_profiled_replicas(self) -> int:
        """Return the largest number of replicas with measured step times."""

    def observe(self, running: RunningJob, times: TrueStepTimes, gradients: GradParams) -> None:
        """Record the times of an iteration, and the gradients' size and noise."""

    def inherit(self, relatives: Sequence[JobModel]) -> None:
        """Begin with what jobs of the same application have measured.

        Args:
            relatives: one at least. The first one's gradients count, as they were at its start.
                It may be asked again, as they measure more, until the job starts.
        """

    def shapes(self) -> tuple[ReplicaShape, ...]:
        """Return the ways a replica may run, with their speedups; the job's own shape first."""

    def configure(
        self, shape: ReplicaShape, placement: Sequence[int], gpu_type: str = ""
    ) -> RunningJob:
        """Choose micro-batches, atomic batch size and accumulation steps for an allocation."""

    def goodput(self, running: RunningJob) -> float:
        """Predict samples (of the initial batch size's worth) per second as the job runs."""

    def base_goodput(self) -> float:
        """Predict the goodput that counts as speedup 1; 0.0: nothing is known yet."""


class Application(Protocol):
    """How jobs of one kind really train."""

    name: str
    init_batch_size: int
    max_batch_size: int
    max_epochs: int
    """An upper bound on the epochs; jobs end when `completion_epoch` is passed."""

    def step_times(self, running: RunningJob) -> TrueStepTimes:
        """Return the true step times."""

    def gradients(self, batch_size: int, epoch: int) -> GradParams:
        """Return the true squared norm and variance of gradients in an epoch."""

    def progress(self, epoch: int) -> float:
        """Return the progress at the end of `epoch` epochs, in iterations at the initial batch."""

    def completion_epoch(self, batch_size: int) -> int:
        """Return the epoch after whose end a job is done."""

    def max_replicas(self, batch_size: int | None = None) -> int:
        """Return the most replicas that can share a batch; None: the largest batch."""

    def new_model(self, batch_size: int | None = None) -> JobModel:
        """Return what a new job knows; `batch_size`: fixed by its user, else it adapts."""
