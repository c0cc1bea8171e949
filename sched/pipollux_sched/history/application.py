"""A job of a scheduler's history as an application for the simulator, from its own measurements.

Step times come from the model that the job had fitted in its last hints, for each number of stages
as in the scheduler (`stage_speedups`), divided by its `pace`. Gradient statistics are those of the
last hints; the job is done when it has trained as much as the original. A new job knows nothing;
once it has trained, it knows all of this except its pace, and is capped by the replicas that it has
tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pipollux_perfmodel import GradParams, SchedHints, SpeedupFunction, stage_speedups
from pipollux_policies import ReplicaShape, SpeedupCallable
from pipollux_sched.allocator.job_infos import linear_speedup, replica_resources
from pipollux_sched.spec.job import JobSpec
from pipollux_simulator.applications.base import JobModel, RunningJob, TrueStepTimes


class HistoryApplication:
    """The training of one job of a history; an `Application`.

    Args:
        spec: its job file.
        hints: its last hints; ValueError: they contain no model of its step times.
        samples: number of trained samples, in units of the initial batch size's samples.
    """

    max_epochs = 1

    def __init__(self, spec: JobSpec, hints: SchedHints, samples: float) -> None:
        speedups = stage_speedups(hints, spec.num_stages, spec.stage_choices)
        if not speedups or hints.init_batch_size is None or hints.grad_params is None:
            raise ValueError(f"hints: those of {spec.name} hold no model of its step times")
        self.name = spec.name
        self.init_batch_size = hints.init_batch_size
        self.max_batch_size = hints.max_batch_size or hints.init_batch_size
        self.spec = spec
        self.speedups = speedups
        """By number of stages, the job's own first."""
        self.pace = 1.0
        self._samples = samples
        # Without gradient statistics, larger batches gain nothing.
        unknown = not sum(hints.grad_params) > 0
        self._gradients = GradParams(1.0, 0.0) if unknown else hints.grad_params
        self._num_microbatches = hints.num_microbatches
        self._configurations: dict[tuple[int, tuple[int, ...], str, int], RunningJob] = {}
        self._times: dict[RunningJob, TrueStepTimes] = {}
        self._most_replicas: int | None = None

    @property
    def own(self) -> SpeedupFunction:
        """The speedup with the job's original number of stages."""
        return self.speedups[self.spec.num_stages]

    def step_times(self, running: RunningJob) -> TrueStepTimes:
        """Return the step times that the job's own model predicts, at its pace."""
        if running not in self._times:
            found = self._speedup(running).goodput_fn.step_time(
                running.num_nodes,
                running.num_replicas,
                running.atomic_bsz,
                0,
                running.num_microbatches,
            )
            optim, accum = float(found.optim_time), float(found.accum_time)
            self._times[running] = TrueStepTimes(optim / self.pace, accum / self.pace)
        return self._times[running]

    def goodput(self, running: RunningJob) -> float:
        """Return the goodput in samples of the initial batch size, by the job's own model."""
        return float(
            self._speedup(running).goodput_fn.evaluate(
                running.num_nodes,
                running.num_replicas,
                running.atomic_bsz,
                running.accum_steps,
                running.num_microbatches,
            )
        )

    def _speedup(self, running: RunningJob) -> SpeedupFunction:
        return self.speedups[running.num_stages].at_level(running.level)

    def gradients(self, batch_size: int, epoch: int) -> GradParams:  # noqa: ARG002  # the protocol's: only the last ones are known
        """Return the last reported squared norm and variance of the gradients."""
        return self._gradients

    def progress(self, epoch: int) -> float:
        """Return the iterations at the initial batch size in some epochs; one is the whole job."""
        return epoch * self._samples / self.init_batch_size

    def completion_epoch(self, batch_size: int) -> int:  # noqa: ARG002  # the protocol's: progress accounts for larger batches
        """Return the last epoch."""
        return self.max_epochs - 1

    def max_replicas(self, batch_size: int | None = None) -> int:  # noqa: ARG002  # the protocol's: the job adapts its batch under any policy
        """Return the most replicas that the user allows and its batches can be divided among."""
        if self._most_replicas is None:
            replicas = np.arange(1, self.spec.max_replicas + 1)
            useful = np.flatnonzero(np.asarray(self.own(np.ones_like(replicas), replicas)) > 0)
            self._most_replicas = int(replicas[useful[-1]]) if useful.size else 1
        return max(self._most_replicas, self.spec.min_replicas)

    def new_model(self, batch_size: int | None = None) -> JobModel:
        """Return the model of a new job: empty, or its step times if sizes are fixed."""
        return HistoryJobModel(self, known=batch_size is not None)

    def configure(
        self, num_stages: int, placement: Sequence[int], gpu_type: str = "", level: int = 1
    ) -> RunningJob:
        """Return how the job runs on an allocation: at its best batch size."""
        key = num_stages, tuple(placement), gpu_type, level
        if key not in self._configurations:
            speedup_fn = self.speedups[num_stages].at_level(level)
            best = speedup_fn.configuration(len(placement), sum(placement))
            # If no batch is within its bounds, divide the initial one.
            atomic_bsz = best.atomic_bsz or math.ceil(self.init_batch_size / sum(placement))
            self._configurations[key] = RunningJob(
                placement=tuple(placement),
                num_stages=num_stages,
                num_microbatches=best.num_microbatches or self._num_microbatches,
                atomic_bsz=atomic_bsz,
                accum_steps=best.accum_steps if best.atomic_bsz else 0,
                gpu_type=gpu_type,
                level=level,
            )
        return self._configurations[key]


class HistoryJobModel:
    """A replayed job's model of itself; a `JobModel`. `known`: it has already been measured."""

    def __init__(self, app: HistoryApplication, *, known: bool = False) -> None:
        self._app = app
        self._known = known
        self.max_profiled_replicas = 0

    def observe(self, running: RunningJob, times: TrueStepTimes, gradients: GradParams) -> None:  # noqa: ARG002  # the protocol's: its model is exact
        """Record that the job has trained on this number of replicas."""
        self._known = True
        self.max_profiled_replicas = max(self.max_profiled_replicas, running.num_replicas)

    def inherit(self, relatives: Sequence[JobModel], *, latest: bool = False) -> None:  # noqa: ARG002  # the protocol's: its model is exact
        """Inherit the measurements of related jobs."""
        self._known = True
        self.max_profiled_replicas = max(model.max_profiled_replicas for model in relatives)

    def shapes(self) -> tuple[ReplicaShape, ...]:
        """Return one shape per number of stages, its own first; that alone until it has trained."""
        app = self._app
        if not self._known:
            return (self._shape(app.spec.num_stages, linear_speedup),)
        return tuple(self._shape(stages, fn) for stages, fn in app.speedups.items())

    def configure(
        self, shape: ReplicaShape, placement: Sequence[int], gpu_type: str = "", level: int = 1
    ) -> RunningJob:
        """Choose micro-batches, batch size and accumulation steps for an allocation."""
        return self._app.configure(shape.num_stages, placement, gpu_type, level)

    def goodput(self, running: RunningJob) -> float:
        """Return the goodput in samples of the initial batch size per second."""
        return self._app.goodput(running)

    def base_goodput(self) -> float:
        """Return the goodput of one replica of its own shape; 0.0 until it has trained."""
        return self._app.own.base_goodput if self._known else 0.0

    def _shape(self, num_stages: int, speedup_fn: SpeedupCallable) -> ReplicaShape:
        spec = self._app.spec
        resources = replica_resources(spec, num_stages)
        return ReplicaShape(num_stages, resources, speedup_fn, spec.gpu_type)
