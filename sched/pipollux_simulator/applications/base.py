"""Interfaces of an application: the true training of its jobs, and their knowledge of it.

A `JobModel` is the knowledge of ONE job: it observes the step times of configurations in which the
job ran, and its gradients, and predicts the rest. Policies only use the model, as in a real
cluster.
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
    """The configuration of a running job: the placement of its replicas, and its batch shape."""

    placement: tuple[int, ...]
    """Number of replicas on each of its nodes, at least 1."""
    num_stages: int = 1
    num_microbatches: int = 1
    atomic_bsz: int = 0
    accum_steps: int = 0
    gpu_type: str = ""
    level: int = 1
    """Network level at which its nodes meet (`Topology`)."""

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
    """With synchronization and the optimizer's step."""
    accum_step: float
    """Without both."""

    def differ(self, predicted: StepTime) -> bool:
        """Return whether either is more than 4 % off its prediction, which causes a new fit."""
        pairs = (predicted.optim_time, self.optim_step), (predicted.accum_time, self.accum_step)
        return any(abs(math.log(guess / seen)) > _TOLERANCE for guess, seen in pairs)


class JobModel(Protocol):
    """The knowledge of one job about itself, which it reports to the scheduler."""

    @property
    def max_profiled_replicas(self) -> int:
        """Return the largest number of replicas with measured step times."""

    def observe(self, running: RunningJob, times: TrueStepTimes, gradients: GradParams) -> None:
        """Record the times of an iteration, and the gradients' size and noise."""

    def inherit(self, relatives: Sequence[JobModel], *, latest: bool = False) -> None:
        """Start with the measurements of jobs of the same application, at least one. The gradients
        are those with which the first one began, or its `latest`. May be called again until the
        job starts.
        """

    def shapes(self) -> tuple[ReplicaShape, ...]:
        """Return the possible replica shapes, with their speedups; the job's own shape first."""

    def configure(
        self, shape: ReplicaShape, placement: Sequence[int], gpu_type: str = "", level: int = 1
    ) -> RunningJob:
        """Choose micro-batches, atomic batch size and accumulation steps for an allocation whose
        nodes meet at a network level.
        """

    def goodput(self, running: RunningJob) -> float:
        """Predict samples (in units of the initial batch size) per second."""

    def base_goodput(self) -> float:
        """Predict the goodput that counts as speedup 1; 0.0: unknown."""


class Application(Protocol):
    """The true training of jobs of one kind."""

    name: str
    init_batch_size: int
    max_batch_size: int
    max_epochs: int

    def step_times(self, running: RunningJob) -> TrueStepTimes:
        """Return the true step times."""

    def gradients(self, batch_size: int, epoch: int) -> GradParams:
        """Return the true squared norm and variance of gradients in an epoch."""

    def progress(self, epoch: int) -> float:
        """Return the progress at the end of `epoch` epochs, in iterations at the initial batch."""

    def completion_epoch(self, batch_size: int) -> int:
        """Return the last epoch of a job."""

    def max_replicas(self, batch_size: int | None = None) -> int:
        """Return the maximum replicas that can share a batch; None: the largest batch."""

    def new_model(self, batch_size: int | None = None) -> JobModel:
        """Return the model of a new job; `batch_size`: fixed by its user, None: adaptive."""
