"""Comparison of pipeline schedules by memory and speed.

Two numbers of a cut decide: T_pipe (`timing.step_time`) and the bytes of the fullest device
(`memory`). 1F1B keeps the activations of min(M, K - k) micro-batches where GPipe keeps M, so it can
run larger batches; interleaved stages wait less, but keep and send more. For a choice over several
batch sizes and numbers of micro-batches, pass a plan of each schedule to
`GoodputFunction.optimize`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipollux_perfmodel.timing.params import CUT_SCHEDULES, Checkpoint, PerfParams, ScheduleKind
from pipollux_perfmodel.timing.step_time import step_time

from .chunks import least_interleaved_memory
from .layer_profile import LayerProfile, Link
from .memory import check_limit
from .partition import least_memory
from .stage_plan import StagePlan, plan_stages

_ROUNDING = 1e-12


class ScheduleOption(NamedTuple):
    """The result of a schedule for one batch."""

    schedule: ScheduleKind
    plan: StagePlan | None
    """The best cut that fits, if any."""
    seconds: float
    """T_pipe of one replica; infinite if no cut fits."""
    memory: float
    """Bytes of the fullest device; if no cut fits, the minimum limit for a cut."""


def compare_schedules(
    profile: LayerProfile,
    num_stages: int,
    num_microbatches: int,
    base: PerfParams,
    *,
    micro_bsz: float,
    memory_limit: float | None = None,
    checkpoint: Checkpoint = "never",
    schedules: Sequence[ScheduleKind] = CUT_SCHEDULES,
    chunks_per_stage: int = 2,
    link: Link | None = None,
    transfers_overlap: bool = True,
) -> list[ScheduleOption]:
    """Return the result of every schedule for one batch, the best one first.

    The best is the fastest schedule that fits, and of equally fast ones the one with less memory.
    Schedules that do not fit come last.

    Args:
        profile: costs of the layers.
        num_stages: K.
        num_microbatches: M.
        base: source of network, γ, ω and overhead.
        micro_bsz: b, samples per micro-batch.
        memory_limit: bytes of each stage's device; None: no limit.
        checkpoint: the recomputed micro-batches.
        schedules: the schedules to compare.
        chunks_per_stage: V of "interleaved", if it is among them.
        link: link that carries activations over a cut; None: copies are free.
        transfers_overlap: whether copies run concurrently with compute.

    Raises:
        ValueError: as `plan_stages`, except for a lack of memory.

    Example:
        >>> from pipollux_perfmodel.partitioning.layer_profile import Layer
        >>> profile = LayerProfile.from_layers([Layer(0, 1, 0, 2, activation_bytes=1)] * 4)
        >>> base = PerfParams(0, 3, 0.2, 0.02, 0.05, 0.01, 1.5)
        >>> [(option.schedule, option.seconds, option.memory)
        ...  for option in compare_schedules(profile, 2, 8, base, micro_bsz=1)]
        [('1f1b', 54.0, 4.0), ('gpipe', 54.0, 16.0)]
    """
    if memory_limit is not None:
        check_limit(memory_limit)
    options = []
    for schedule in schedules:
        least = least_schedule_memory(
            profile,
            num_stages,
            num_microbatches,
            micro_bsz=micro_bsz,
            checkpoint=checkpoint,
            schedule=schedule,
            chunks_per_stage=chunks_per_stage,
        )
        if memory_limit is not None and least > memory_limit * (1 + _ROUNDING):
            options.append(ScheduleOption(schedule, None, math.inf, least))
            continue
        plan = plan_stages(
            profile,
            num_stages,
            num_microbatches,
            base,
            micro_bsz=micro_bsz,
            memory_limit=memory_limit,
            checkpoint=checkpoint,
            schedule=schedule,
            chunks_per_stage=chunks_per_stage,
            link=link,
            transfers_overlap=transfers_overlap,
        )
        batch = 1, 1, micro_bsz * num_microbatches, 0, num_microbatches
        seconds = float(step_time(plan.perf_params, *batch).accum_time)
        memory = float(plan.memory(micro_bsz, num_microbatches).max())
        options.append(ScheduleOption(schedule, plan, seconds, memory))
    return sorted(options, key=_worth)


def least_schedule_memory(
    profile: LayerProfile,
    num_stages: int,
    num_microbatches: int,
    *,
    micro_bsz: float,
    checkpoint: Checkpoint,
    schedule: ScheduleKind,
    chunks_per_stage: int = 2,
) -> float:
    """Return the bytes of the fullest device in the cut that minimizes them; as `least_memory`.

    >>> from pipollux_perfmodel.partitioning.layer_profile import Layer
    >>> profile = LayerProfile.from_layers([Layer(0, 1, 0, 2, activation_bytes=1)] * 8)
    >>> [least_schedule_memory(profile, 2, 8, micro_bsz=1, checkpoint="never", schedule=kind)
    ...  for kind in ("gpipe", "1f1b", "interleaved")]
    [32.0, 6.0, 10.0]
    """
    load: dict[str, Any] = {"micro_bsz": micro_bsz, "checkpoint": checkpoint}
    if schedule == "interleaved":
        counts = chunks_per_stage, num_stages, num_microbatches
        return least_interleaved_memory(profile, *counts, **load)
    return least_memory(profile, num_stages, num_microbatches, schedule=schedule, **load)


def reschedule(
    params: PerfParams,
    schedule: ScheduleKind,
    chunks_per_stage: int = 2,
    *,
    alpha_t: Sequence[float] = (),
    beta_t: Sequence[float] = (),
) -> PerfParams:
    """Predict another schedule with the same stages from a run with one schedule.

    Forwards and backwards of a micro-batch take the same time in each stage with any schedule, and
    so does the network; ω and the overhead, which cover effects outside the formulas, are assumed
    to stay the same. Fitted parameters include the messages of the run. Interleaved stages of V
    chunks send (K·V - 1)/(K - 1) times as many, and the difference must be given.

    Args:
        params: of the run.
        schedule: the other schedule.
        chunks_per_stage: V, if the other schedule is interleaved.
        alpha_t: seconds of the copy over each boundary of stages independent of its size, K - 1
            entries, if `params` are fitted and do not contain it; empty: additional messages are
            free.
        beta_t: seconds per sample of the same copy.

    Example:
        >>> run = PerfParams(0.1, 0.01, 0, 0, 0, 0, 1, (1 / 6,) * 2, (1 / 3,) * 2, schedule="1f1b")
        >>> other = reschedule(run, "interleaved", alpha_t=(0.3,))
        >>> other.schedule, other.chunks_per_stage, [round(t, 3) for t in other.alpha_t]
        ('interleaved', 2, [0.2])
    """
    chunks = chunks_per_stage if schedule == "interleaved" else 1
    other = params._replace(schedule=schedule, chunks_per_stage=chunks)
    known = bool(params.alpha_t or params.beta_t)
    if known or chunks <= params.chunks_per_stage or params.num_stages == 1:
        return other
    before, after = (params.num_stages * v - 1 for v in (params.chunks_per_stage, chunks))
    more = (after - before) / after
    # torch's schedules wait for a message when its turn comes: the receiving device idles.
    return other._replace(
        alpha_t=tuple(seconds * more for seconds in alpha_t),
        beta_t=tuple(seconds * more for seconds in beta_t),
        transfers_overlap=False,
    )


def _worth(option: ScheduleOption) -> tuple[float, float]:
    """Return the key to minimize; times that differ only by rounding are equal."""
    return float(f"{option.seconds:.9e}"), option.memory
