"""A job with one number of stages, and its best configurations on allocations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipollux_perfmodel import (
    Configuration,
    GoodputFunction,
    GradParams,
    PerfParams,
    SpeedupFunction,
    reschedule,
    restage,
)
from pipollux_perfmodel.timing.params import ScheduleKind

from .cutting import Layers, ScheduleWish, cut_layers
from .params_file import Bounds, ModelFile

# Noise without a gradient: samples count equally in any batch, so efficiency is 1.
_EFFICIENCY_ONE = GradParams(0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One allocation, and the job's best configuration on it."""

    num_stages: int
    measured: bool
    from_layers: bool
    balance: tuple[int, ...] | None
    """Layers of each stage, if layers determine step times or memory; None also if no cut fits."""
    num_replicas: int
    num_nodes: int
    num_gpus: int
    schedule: ScheduleKind
    chunks_per_stage: int
    schedule_measured: bool
    memory: float | None
    """Bytes of the fullest device; None: layers or limit unknown, or nothing within bounds."""
    num_microbatches: int
    atomic_bsz: int
    """0: no batch size is within bounds; the remaining fields are then 0 or None."""
    accum_steps: int
    batch_size: int
    step_time: float | None
    """Seconds of an iteration: all accumulation steps and the optimizer step."""
    throughput: float
    """Samples per second."""
    efficiency: float | None
    """Progress per sample, relative to the initial batch size; None: unknown."""
    goodput: float | None
    speedup: float
    """Goodput (or throughput, if that is unknown) over that of one replica of the same stages."""
    best: bool = True
    """Whether no other requested schedule is better on the same stages and replicas."""

    @property
    def feasible(self) -> bool:
        """Whether any batch size is within bounds."""
        return self.atomic_bsz > 0


class StageModel:
    """A job with K stages; unmeasured stages are cut from `layers`, if given.

    Without a schedule, that of the nearest measured K. ModelingError if the layers cannot be cut
    into K.
    """

    def __init__(
        self,
        model: ModelFile,
        layers: Layers | None,
        bounds: Bounds,
        init_batch_size: int,
        num_stages: int,
        schedule: ScheduleWish | None = None,
    ) -> None:
        base = model.nearest(num_stages)
        asked = schedule is not None
        schedule = schedule or _schedule_of(base, num_stages, layers)
        self._schedule = schedule
        self._schedule_measured = schedule == (base.schedule, base.chunks_per_stage)
        self._num_stages = num_stages
        self._measured = base.num_stages == num_stages
        self._from_layers = layers is not None and not self._measured
        limited = layers is not None and layers.memory_limit is not None
        cut = None
        if layers is not None and (self._from_layers or limited or asked):
            cut = cut_layers(layers, num_stages, base, bounds, init_batch_size, schedule)
        self._plan = cut and cut.plan
        self._efficiency_known = model.grad_params is not None
        self._goodput_fn = GoodputFunction(
            self._plan.perf_params
            if self._plan
            else reschedule(restage(base, num_stages), *schedule),
            model.grad_params or _EFFICIENCY_ONE,
            init_batch_size,
        )
        self.least_memory = cut.least_memory if cut else 0.0
        self.fit = cut is None or cut.plan is not None
        self._speedup_fn = SpeedupFunction(
            self._goodput_fn,
            max_batch_size=bounds.max_batch_size,
            atomic_bsz_range=bounds.atomic_bsz_range,
            accumulation=bool(bounds.accumulation),
            num_microbatches=bounds.num_microbatches or 1,
            plans=[self._plan] if self._plan else [],
            memory_limit=layers.memory_limit if layers and self._plan else None,
        )

    @property
    def schedule(self) -> ScheduleWish:
        """The schedule of the stages."""
        return self._schedule

    def predict(self, num_nodes: int, num_replicas: int) -> Prediction:
        """Return the best configuration on an allocation, and its goodput."""
        chosen = self._choose(num_nodes, num_replicas)
        feasible = chosen.goodput > 0
        sizes = num_nodes, num_replicas, chosen.atomic_bsz, chosen.accum_steps
        goodput_fn = self._goodput_fn
        times = goodput_fn.step_time(*sizes, chosen.num_microbatches) if feasible else None
        batch_size = chosen.batch_size if feasible else 0
        known = self._efficiency_known
        memory = None
        if feasible and self._plan:
            # Size of the larger micro-batches if they differ by a sample.
            micro_bsz = math.ceil(chosen.atomic_bsz / chosen.num_microbatches)
            memory = float(self._plan.memory(micro_bsz, chosen.num_microbatches).max())
        return Prediction(
            num_stages=self._num_stages,
            measured=self._measured,
            from_layers=self._from_layers,
            balance=self._plan.balance if self._plan else None,
            num_replicas=num_replicas,
            num_nodes=num_nodes,
            num_gpus=self._num_stages * num_replicas,
            schedule=self._schedule.kind,
            chunks_per_stage=self._schedule.chunks_per_stage,
            schedule_measured=self._schedule_measured,
            memory=memory,
            num_microbatches=chosen.num_microbatches if feasible else 0,
            atomic_bsz=int(chosen.atomic_bsz) if feasible else 0,
            accum_steps=int(chosen.accum_steps) if feasible else 0,
            batch_size=int(batch_size),
            step_time=None if times is None else float(times.total),
            throughput=0.0 if times is None else float(batch_size / times.total),
            efficiency=float(goodput_fn.efficiency(batch_size)) if feasible and known else None,
            goodput=float(chosen.goodput) if known else None,
            speedup=float(chosen.speedup),
        )

    def _choose(self, num_nodes: int, num_replicas: int) -> Configuration:
        if self.fit:
            return self._speedup_fn.configuration(num_nodes, num_replicas)
        return Configuration(self._num_stages, num_replicas, 0, 0, 0, goodput=0.0, speedup=0.0)


def _schedule_of(base: PerfParams, num_stages: int, layers: Layers | None) -> ScheduleWish:
    interleaved = base.schedule == "interleaved"
    if interleaved and layers is not None and num_stages != base.num_stages:
        return ScheduleWish("1f1b")
    return ScheduleWish(base.schedule, base.chunks_per_stage)
