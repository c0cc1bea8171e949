"""The model of a pipeline job, which reports the speedups of every K to the scheduler.

Step times come from `StepTimeLearner`, and the noise of gradients from the job's last step.
`GoodputFunction.optimize` chooses the best M, batch size and accumulation of an allocation within
the memory of the device. The speedups of all shapes are relative to one replica of the first shape,
with the fewest stages that fit the first type of GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipollux_perfmodel import GoodputFunction, GradParams, Optimum, SpeedupFunction, StagePlan
from pipollux_policies import ReplicaShape

from .base import JobModel, RunningJob, TrueStepTimes
from .devices import Device
from .pipeline_job import MIN_SAMPLES, UNKNOWN, PipelineJob
from .pipeline_learning import StepTimeLearner

UNSEEN_GRADIENTS = GradParams(1.0, 1.0)
"""Noise as large as the gradient, before the first step."""
_NOISE_TOLERANCE = 0.1  # relative change of the noise scale without effect on choices and speedups


class PipelineJobModel:
    """Online model of a job with known layers, and a batch size if its user fixes it; a `JobModel`.

    >>> from pipollux_simulator.applications.devices import A100_40G
    >>> from pipollux_simulator.applications.gpt import GPT_MODELS
    >>> model = PipelineJobModel(PipelineJob(GPT_MODELS["gpt-2.7b"], (A100_40G,)))
    >>> [(shape.num_stages, shape.resources) for shape in model.shapes()]
    [(2, {'slots': 2}), (4, {'slots': 4}), (8, {'slots': 8})]
    """

    def __init__(self, job: PipelineJob, batch_size: int | None = None) -> None:
        check_batch_size(job, batch_size)
        self.max_profiled_replicas = 0
        self._job = job
        self._batch_size = batch_size
        self._learner = StepTimeLearner(job)
        self._gradients = UNSEEN_GRADIENTS
        self._first_gradients: GradParams | None = None
        self._shapes: tuple[ReplicaShape, ...] | None = None
        self._shapes_gradients = UNSEEN_GRADIENTS
        self._chosen: dict[tuple[int, str, int, int, int], Optimum] = {}
        self._base_goodput = 0.0

    def observe(self, running: RunningJob, times: TrueStepTimes, gradients: GradParams) -> None:
        """Record the times of an iteration, above 0, and the gradients' size and noise."""
        missed = self._learner.observe(running, times)
        self.max_profiled_replicas = max(self.max_profiled_replicas, running.num_replicas)
        self._first_gradients = self._first_gradients or gradients
        self._gradients = gradients
        if missed or noise_differs(gradients, self._shapes_gradients):
            self._shapes = None
            self._chosen.clear()

    def inherit(self, relatives: Sequence[JobModel], *, latest: bool = False) -> None:
        """Start with the jobs' step times, and with the gradients of the first one."""
        alike = [model for model in relatives if isinstance(model, PipelineJobModel)]
        if not alike:
            return
        first = alike[0]
        gradients = first._gradients if latest else first._first_gradients
        new = self._learner.inherit([model._learner for model in alike])
        if new or gradients != self._first_gradients:
            self.max_profiled_replicas = max(model.max_profiled_replicas for model in alike)
            self._first_gradients = gradients
            self._gradients = gradients or UNSEEN_GRADIENTS
            self._shapes = None
            self._chosen.clear()

    def shapes(self) -> tuple[ReplicaShape, ...]:
        """Return one shape per type of GPU and number of stages that fits, fewest stages first."""
        if self._shapes is None:
            self._shapes_gradients = self._gradients
            self._base_goodput = self._find_base()
            self._shapes = tuple(
                self._shape(num_stages, device)
                for device in self._job.devices
                for num_stages in self._job.plans(device)
            )
        return self._shapes

    def configure(
        self, shape: ReplicaShape, placement: Sequence[int], gpu_type: str = "", level: int = 1
    ) -> RunningJob:
        """Choose M, atomic batch size and accumulation steps for an allocation. Raises ValueError
        if there is no such shape on such GPUs, or no batch size within bounds.
        """
        best = self._best(
            shape.num_stages, self._job.device(gpu_type), len(placement), sum(placement), level
        )
        if not best.goodput > 0:
            raise ValueError(
                f"placement: {tuple(placement)} leaves {self._job.model.name} no batch size "
                f"from {self._init_batch_size} to {self._job.model.max_batch_size}; "
                f"give at most {self._max_replicas} replicas"
            )
        return RunningJob(
            placement=tuple(placement),
            num_stages=shape.num_stages,
            num_microbatches=best.num_microbatches,
            atomic_bsz=best.atomic_bsz,
            accum_steps=best.accum_steps,
            gpu_type=gpu_type,
            level=level,
        )

    def goodput(self, running: RunningJob) -> float:
        """Predict samples (in units of the initial batch size) per second. ValueError for too small
        a batch.
        """
        params = self._learner.params(self._job.way(running), running.gpu_type)
        params = params.at_level(running.level)
        function = GoodputFunction(params, self._gradients, self._job.model.init_batch_size)
        return float(
            function.evaluate(
                running.num_nodes,
                running.num_replicas,
                running.atomic_bsz,
                running.accum_steps,
                running.num_microbatches,
            )
        )

    def base_goodput(self) -> float:
        """Predict the goodput of one replica of the first shape, which counts as speedup 1."""
        self.shapes()
        return self._base_goodput

    @property
    def _init_batch_size(self) -> int:
        return self._batch_size or self._job.model.init_batch_size

    @property
    def _max_batch_size(self) -> int | None:
        # None: the initial batch size, rounded up to a multiple of the replicas.
        return self._job.model.max_batch_size if self._batch_size is None else None

    @property
    def _max_replicas(self) -> int:
        return (self._batch_size or self._job.model.max_batch_size) // MIN_SAMPLES

    def _plans(self, num_stages: int, device: Device) -> tuple[StagePlan, ...]:
        """Return the cut without and with recomputation, with estimated step times."""
        return tuple(
            replace(plan, perf_params=self._learner.params(plan, device.name))
            for plan in self._job.ways(num_stages, device)
        )

    def _function(self, plans: Sequence[StagePlan]) -> GoodputFunction:
        """Return the goodput to maximize; with a fixed batch, relative to that batch."""
        return GoodputFunction(plans[0].perf_params, self._gradients, self._init_batch_size)

    def _efficiency(self) -> float:
        """Return the efficiency of the fixed batch; 1 for an adaptive batch."""
        function = GoodputFunction(UNKNOWN, self._gradients, self._job.model.init_batch_size)
        return float(function.efficiency(self._init_batch_size))

    def _fitting(self) -> Device:
        return next(device for device in self._job.devices if self._job.plans(device))

    def _find_base(self) -> float:
        device = self._fitting()
        best = self._best(next(iter(self._job.plans(device))), device, 1, 1)
        return float(best.goodput) * self._efficiency()

    def _best(
        self, num_stages: int, device: Device, num_nodes: int, num_replicas: int, level: int = 1
    ) -> Optimum:
        key = num_stages, device.name, num_nodes, num_replicas, level
        if key not in self._chosen:
            plans = tuple(plan.at_level(level) for plan in self._plans(num_stages, device))
            self._chosen[key] = self._function(plans).optimize(
                num_nodes, num_replicas, **self._bounds(plans, device)
            )
        return self._chosen[key]

    def _bounds(self, plans: tuple[StagePlan, ...], device: Device) -> dict[str, Any]:
        return {
            "max_batch_size": self._max_batch_size,
            "accumulation": True,
            "num_microbatches": self._job.microbatch_counts(len(plans[0].balance)),
            "plans": plans,
            "memory_limit": device.memory_limit,
        }

    def _shape(self, num_stages: int, device: Device) -> ReplicaShape:
        plans = self._plans(num_stages, device)
        speedup_fn = SpeedupFunction(
            self._function(plans),
            base_goodput=self._base_goodput / self._efficiency(),
            **self._bounds(plans, device),
        )
        return ReplicaShape(
            num_stages,
            {"slots": num_stages},
            speedup_fn,
            device.name if len(self._job.devices) > 1 else None,
            self._max_replicas,
        )


def check_batch_size(job: PipelineJob, batch_size: int | None) -> None:
    """Raise ValueError for a batch size that the model does not support."""
    model = job.model
    if batch_size is not None and not model.init_batch_size <= batch_size <= model.max_batch_size:
        raise ValueError(
            f"batch_size: {batch_size} of {model.name} must be between {model.init_batch_size} "
            f"and {model.max_batch_size}"
        )


def noise_differs(one: GradParams, other: GradParams) -> bool:
    """Return whether two noise scales differ enough to affect speedups."""
    cross = one.var * other.sqr, other.var * one.sqr
    return abs(cross[0] - cross[1]) > _NOISE_TOLERANCE * max(cross)
