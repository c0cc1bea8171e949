"""Properties of a pipeline job that are known before it runs: layers, memory, batch sizes, cuts.

The layers are cut once per number of stages and type of GPU, with `plan_stages` within the device's
memory; numbers of stages that do not fit are omitted. A job recomputes only in configurations that
would not fit otherwise, so more stages may avoid recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from pipollux_perfmodel import LayerProfile, PerfParams, StagePlan, partition, price_stages
from pipollux_perfmodel.timing.params import Checkpoint, Checkpoints
from pipollux_perfmodel.timing.step_time import EPSILON

from .base import RunningJob
from .devices import Device
from .gpt import GptModel, gpt_profile

STAGE_COUNTS = (1, 2, 4, 8)
RECOMPUTING: Checkpoint = "except_last"
"""Checkpoint mode if memory requires it; torchgpipe's default."""
MICROBATCH_COUNTS = (4, 8, 16, 32)
"""Possible M with several stages. With one, M = 1 without recomputation, and jobs accumulate."""
MIN_SAMPLES = 4
"""Minimum samples per replica and iteration: with fewer, pipelines are mostly bubble."""
UNKNOWN = PerfParams(EPSILON, EPSILON, EPSILON, EPSILON, EPSILON, EPSILON, 1.0)
"""Parameters of a job without measurements of the network: free, as in Pollux."""
_ROUNDING = 1e-12  # as in `largest_micro_bsz`
_CUT_FOR = 8  # micro-batches of one sample that must fit, and for which the cut is optimized


@dataclass(frozen=True)
class PipelineJob:
    """Layers of a model, and its cuts; ValueError if it does not fit on any device."""

    model: GptModel
    devices: tuple[Device, ...]
    """Allowed types of GPU; with a single one, also nodes without a type."""
    fixed_stages: int | None = None
    """The only allowed K; None: any of `STAGE_COUNTS` that fits."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("devices is empty; give at least one type of GPU")
        if not any(self.plans(device) for device in self.devices):
            stages = self.fixed_stages or f"{STAGE_COUNTS[0]} to {STAGE_COUNTS[-1]}"
            raise ValueError(
                f"fixed_stages: {self.model.name} does not fit in {stages} stages on "
                f"{', '.join(device.name for device in self.devices)}; "
                "give a device with more memory, or more stages"
            )

    def device(self, gpu_type: str) -> Device:
        """Return a device by name, the first for an empty one; ValueError for other GPUs."""
        if not gpu_type:
            return self.devices[0]
        for device in self.devices:
            if device.name == gpu_type:
                return device
        known = ", ".join(device.name for device in self.devices)
        raise ValueError(
            f"gpu_type: {gpu_type!r} is not one of {known}; put the job on one of them"
        )

    def plans(self, device: Device) -> Mapping[int, StagePlan]:
        """Return the cut for each K that fits a device, fewest stages first."""
        plans = _plans(self.model, device)
        if self.fixed_stages is None:
            return plans
        return {k: plan for k, plan in plans.items() if k == self.fixed_stages}

    def plan(self, num_stages: int, device: Device) -> StagePlan:
        """Return the cut into K stages; ValueError if K does not fit, or is not allowed."""
        plans = self.plans(device)
        if num_stages not in plans:
            raise ValueError(
                f"num_stages: {self.model.name} cannot run in {num_stages} stages on "
                f"{device.name}; give one of {list(plans)}"
            )
        return plans[num_stages]

    def ways(self, num_stages: int, device: Device) -> tuple[StagePlan, ...]:
        """Return the cut into K stages without and with recomputation, if different; as `plan`."""
        plan = self.plan(num_stages, device)
        return (_keeping(plan, device), plan) if num_stages > 1 else (plan,)

    def way(self, running: RunningJob) -> StagePlan:
        """Return the cut of a running job: with recomputation if it does not fit without."""
        device = self.device(running.gpu_type)
        *keeping, recomputing = self.ways(running.num_stages, device)
        micro_bsz = running.atomic_bsz / running.num_microbatches
        for plan in keeping:
            needed = float(plan.memory(micro_bsz, running.num_microbatches).max())
            if needed <= device.memory_limit * (1 + _ROUNDING):
                return plan
        return recomputing

    def microbatch_counts(self, num_stages: int) -> tuple[int, ...]:
        """Return the possible M."""
        return MICROBATCH_COUNTS if num_stages > 1 else (1,)

    @property
    def max_replicas(self) -> int:
        """Maximum replicas: each has at least `MIN_SAMPLES` of the largest batch."""
        return self.model.max_batch_size // MIN_SAMPLES


@lru_cache(maxsize=64)
def _plans(model: GptModel, device: Device) -> Mapping[int, StagePlan]:
    profile = gpt_profile(model, device)
    plans: dict[int, StagePlan] = {}
    for num_stages in STAGE_COUNTS:
        balance = _cut(profile, device, num_stages)
        if balance is not None:
            params = price(profile, balance, device, UNKNOWN)
            plans[num_stages] = StagePlan(balance, params, profile)
    return plans


@lru_cache(maxsize=256)
def _keeping(plan: StagePlan, device: Device) -> StagePlan:
    params = price(plan.profile, plan.balance, device, UNKNOWN, "never")
    return replace(plan, perf_params=params)


def price(
    profile: LayerProfile,
    balance: tuple[int, ...],
    device: Device,
    network: PerfParams,
    checkpoint: Checkpoints = RECOMPUTING,
) -> PerfParams:
    """Return the step time parameters of a cut, with network and γ of `network`."""
    params = price_stages(profile, balance, network, checkpoint=checkpoint, link=device.link)
    # The fitted network is the part of T_net that the backward did not hide.
    return params._replace(gradient_shares=())


def _cut(profile: LayerProfile, device: Device, num_stages: int) -> tuple[int, ...] | None:
    try:
        return tuple(
            partition(
                profile,
                num_stages,
                _CUT_FOR,
                device.memory_limit,
                micro_bsz=1.0,
                checkpoint=RECOMPUTING,
                link=device.link,
            )
        )
    except ValueError:
        # The arguments are valid, so memory is insufficient.
        return None
