"""The cut of a model's layers into stages for a prediction.

As in a job, one cut serves all allocations of a number of stages. It is made for the largest
allowed M, and for micro-batches of b samples in the middle of the used range: the initial batch
size on one replica (within the bounds of the atomic batch size) over M, rounded up. If no such cut
fits into memory, b is halved; finally the least atomic batch size is tried with every M.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipollux_perfmodel import (
    LayerProfile,
    Link,
    PerfParams,
    StagePlan,
    least_schedule_memory,
    plan_stages,
    reschedule,
)
from pipollux_perfmodel.partitioning.stage_plan import copy_costs
from pipollux_perfmodel.timing.params import ScheduleKind, keeps_most, modes_of_cut

from .errors import ModelingError
from .params_file import Bounds


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers of a model, and the devices that they run on."""

    name: str
    profile: LayerProfile
    link: Link | None = None
    """None: copies are free."""
    memory_limit: int | None = None
    """Bytes of a stage's device; None: unlimited."""


class ScheduleWish(NamedTuple):
    """A requested schedule, with V chunks per stage."""

    kind: ScheduleKind
    chunks_per_stage: int = 1

    def __str__(self) -> str:
        """Return its name, with its chunks if several."""
        several = self.chunks_per_stage > 1
        return f"{self.kind} of {self.chunks_per_stage} chunks" if several else self.kind


class Cut(NamedTuple):
    """The cut for a number of stages, or the memory that it would need."""

    plan: StagePlan | None
    """None: no cut fits into memory."""
    least_memory: float
    """Bytes of the fullest device with the smallest allowed micro-batches; 0.0: not computed."""


class _Load(NamedTuple):
    num_microbatches: int
    micro_bsz: int


def cut_layers(
    layers: Layers,
    num_stages: int,
    base: PerfParams,
    bounds: Bounds,
    init_batch_size: int,
    schedule: ScheduleWish,
) -> Cut:
    """Return the fastest cut that fits, priced with the network, γ and ω of `base`.

    `base` is of the nearest measured number of stages; if K itself was measured, these are the
    cut's step times, and the layers determine its memory. Raises ModelingError if there are fewer
    layers than stages, or they take no time.
    """
    loads = list(_loads(bounds, init_batch_size))
    parts = num_stages * schedule.chunks_per_stage
    if parts > layers.profile.num_layers:
        chunks = f" of {schedule.chunks_per_stage} chunks" if parts > num_stages else ""
        raise ModelingError(
            f"{layers.name}: {layers.profile.num_layers} layers cannot be cut into {num_stages} "
            f"stages{chunks}; give fewer --stages, or the profile of finer layers"
        )
    if layers.memory_limit is None:
        return Cut(_plan(layers, num_stages, loads[0], base, schedule), 0.0)
    needed = [
        least_schedule_memory(
            layers.profile,
            num_stages,
            load.num_microbatches,
            micro_bsz=load.micro_bsz,
            checkpoint=keeps_most(base.checkpoint),
            schedule=schedule.kind,
            chunks_per_stage=schedule.chunks_per_stage,
        )
        for load in loads
    ]
    fitting = (
        load for load, need in zip(loads, needed, strict=True) if need <= layers.memory_limit
    )
    load = next(fitting, None)
    return Cut(load and _plan(layers, num_stages, load, base, schedule), min(needed))


def _loads(bounds: Bounds, init_batch_size: int) -> Iterator[_Load]:
    counts = sorted(bounds.num_microbatches or (1,), reverse=True)
    low, high = bounds.atomic_bsz_range or (None, None)
    least = low or 1
    middle = max(min(init_batch_size, high or init_batch_size), least)
    most = counts[0]
    micro_bsz = -(-middle // most)
    while micro_bsz * most >= least and micro_bsz:
        yield _Load(most, micro_bsz)
        micro_bsz //= 2
    for count in counts:
        yield _Load(count, -(-least // count))


def _plan(
    layers: Layers, num_stages: int, load: _Load, base: PerfParams, schedule: ScheduleWish
) -> StagePlan:
    try:
        plan = plan_stages(
            layers.profile,
            num_stages,
            load.num_microbatches,
            base,
            micro_bsz=load.micro_bsz,
            memory_limit=layers.memory_limit,
            checkpoint=modes_of_cut(base.checkpoint, num_stages),
            schedule=schedule.kind,
            chunks_per_stage=schedule.chunks_per_stage,
            link=layers.link,
            transfers_overlap=base.transfers_overlap,
        )
    except ValueError as error:
        raise ModelingError(f"{layers.name}: {error}") from None
    if num_stages != base.num_stages:
        return plan
    # Measured times have precedence over predicted ones.
    copies = copy_costs(layers.profile, plan.balance, num_stages, layers.link)
    return replace(
        plan, perf_params=reschedule(base, *schedule, alpha_t=copies[0], beta_t=copies[1])
    )
