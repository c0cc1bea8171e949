"""Sia's model of a pipeline job (Jayaram Subramanya et al., SOSP'23, section 3.5), for comparison.

The only published scheduler that scales jobs with pipeline and data parallelism has this model in
its released simulator:

    T = 3·((S - 1) + M)·fwd + T_net        one plan of S stages per type of GPU, M = 48

with micro-batches of one sample, equal stages, free copies, and neither accumulation nor a choice
of the batch size: R replicas train with 48·R samples. The plan has the fewest stages that fit. fwd
is half a backward; here it is estimated from accumulation steps, and before the first one from the
layers. T_net is estimated as in `PipelineJobModel`, as the released code omits it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipollux_perfmodel import GoodputFunction, GradParams, PerfParams
from pipollux_perfmodel.timing.step_time import network_time
from pipollux_policies import ReplicaShape

from .base import RunningJob, TrueStepTimes
from .devices import Device
from .pipeline_job import UNKNOWN, PipelineJob
from .pipeline_learning import fit_network
from .pipeline_model import UNSEEN_GRADIENTS

NUM_MICROBATCHES = 48
"""M, and the samples of a replica."""


class SiaPipelineModel:
    """Sia's online model of a pipeline job; a `JobModel`.

    Raises ValueError for a given batch size, or if one replica has fewer samples than the initial
    batch size, or 48 micro-batches of one sample do not fit.
    """

    def __init__(self, job: PipelineJob, batch_size: int | None = None) -> None:
        if batch_size is not None:
            raise ValueError(
                f"batch_size: {batch_size} cannot be kept by Sia's pipeline jobs, which take "
                f"{NUM_MICROBATCHES} samples a replica; leave it out or use PipelineJobModel"
            )
        if job.model.init_batch_size > NUM_MICROBATCHES:
            raise ValueError(
                f"init_batch_size: {job.model.init_batch_size} of {job.model.name} must be at most "
                f"{NUM_MICROBATCHES}, which is what one replica takes"
            )
        self.max_profiled_replicas = 0
        self._job = job
        self._gradients = UNSEEN_GRADIENTS
        self._points: dict[str, dict[RunningJob, TrueStepTimes]] = {}
        self._networks: dict[str, PerfParams] = {}
        self._stages = {device.name: _plan(job, device) for device in job.devices}
        if not any(self._stages.values()):
            raise ValueError(
                f"devices: {job.model.name} does not fit any of them with {NUM_MICROBATCHES} "
                "micro-batches of one sample; give one with more memory"
            )

    def observe(self, running: RunningJob, times: TrueStepTimes, gradients: GradParams) -> None:
        """Record the times of an iteration, and the gradients' size and noise."""
        device = self._job.device(running.gpu_type)
        points = self._points.setdefault(device.name, {})
        running = replace(running, placement=tuple(sorted(running.placement)))
        if points.get(running) != times:
            points[running] = times
            self._networks.pop(device.name, None)
        self.max_profiled_replicas = max(self.max_profiled_replicas, running.num_replicas)
        self._gradients = gradients

    def shapes(self) -> tuple[ReplicaShape, ...]:
        """Return one shape per type of GPU that the job fits on."""
        return tuple(
            ReplicaShape(
                stages,
                {"slots": stages},
                self._speedup_fn(device),
                device.name if len(self._job.devices) > 1 else None,
                self._max_replicas,
            )
            for device in self._job.devices
            if (stages := self._stages[device.name])
        )

    def configure(
        self, shape: ReplicaShape, placement: Sequence[int], gpu_type: str = "", level: int = 1
    ) -> RunningJob:
        """Return the configuration on an allocation; there is no choice."""
        return RunningJob(
            placement=tuple(placement),
            num_stages=shape.num_stages,
            num_microbatches=NUM_MICROBATCHES,
            atomic_bsz=NUM_MICROBATCHES,
            gpu_type=gpu_type,
            level=level,
        )

    def goodput(self, running: RunningJob) -> float:
        """Predict samples (in units of the initial batch size) per second."""
        device = self._job.device(running.gpu_type)
        return float(self._goodput(device, running.num_nodes, running.num_replicas))

    def base_goodput(self) -> float:
        """Predict the goodput of one replica of the first shape."""
        device = next(device for device in self._job.devices if self._stages[device.name])
        return float(self._goodput(device, 1, 1))

    @property
    def _max_replicas(self) -> int:
        return self._job.model.max_batch_size // NUM_MICROBATCHES

    def _speedup_fn(self, device: Device) -> Any:
        base = self.base_goodput()
        # Later measurements must not change a returned function.
        constants = self._constants(device)

        def speedup(num_nodes: Any, num_replicas: Any) -> Any:
            nodes, replicas = np.broadcast_arrays(num_nodes, num_replicas)
            goodput = _goodput(constants, np.maximum(nodes, 1), np.maximum(replicas, 1))
            found = np.where(replicas > 0, goodput / base, 0.0)
            return found.item() if found.ndim == 0 else found

        return speedup

    def _goodput(self, device: Device, num_nodes: Any, num_replicas: Any) -> Any:
        return _goodput(self._constants(device), np.asarray(num_nodes), np.asarray(num_replicas))

    def _constants(self, device: Device) -> tuple[float, PerfParams, GoodputFunction, int]:
        gradients = GoodputFunction(UNKNOWN, self._gradients, self._job.model.init_batch_size)
        seconds = 3 * self._slots(device) * self._forward_seconds(device)
        return seconds, self._network(device), gradients, self._max_replicas

    def _slots(self, device: Device) -> int:
        return self._stages[device.name] - 1 + NUM_MICROBATCHES

    def _forward_seconds(self, device: Device) -> float:
        points = self._points.get(device.name, {})
        if points:
            # T_accum = 3·((S - 1) + M)·fwd
            logs = [math.log(times.accum_step) for times in points.values()]
            return math.exp(math.fsum(logs) / len(logs)) / 3 / self._slots(device)
        stages = self._stages[device.name]
        profile = self._job.plan(stages, device).profile
        return float(profile.forward_seconds(1.0).sum()) / stages

    def _network(self, device: Device) -> PerfParams:
        points = self._points.get(device.name, {})
        if not any(running.num_replicas > 1 for running in points):
            return UNKNOWN
        if device.name not in self._networks:
            self._networks[device.name] = fit_network(points)
        return self._networks[device.name]


def _goodput(
    constants: tuple[float, PerfParams, GoodputFunction, int], num_nodes: Any, num_replicas: Any
) -> Any:
    """Return 48·R / T · efficiency(48·R), 0.0 above the maximum batch size."""
    seconds, network, gradients, most = constants
    batch_size = NUM_MICROBATCHES * num_replicas
    total = seconds + network_time(network, num_nodes, num_replicas)
    goodput = batch_size / total * gradients.efficiency(batch_size)
    return np.where(num_replicas <= most, goodput, 0.0)


def _plan(job: PipelineJob, device: Device) -> int:
    for num_stages, plan in job.plans(device).items():
        if float(plan.largest_micro_bsz(device.memory_limit, NUM_MICROBATCHES)) >= 1:
            return num_stages
    return 0
