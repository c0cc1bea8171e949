"""Conversion of a cut of the layers to `PerfParams`, and correction of layers by measurements.

A stage's times are the sums of its layers' times, linear in b, with

    C(b) = alpha_c + beta_c·b       alpha_c = Σ over layers of the forward's and backward's alpha,
                                    beta_c the same of beta; with recomputation, the forward twice
    φ_k, ψ_k                        stage k's part of beta_c; φα_k, ψα_k of alpha_c
    t_k(b)                          latency + bytes of the output at cut k · b / bandwidth
    ρ_k                             stage k's part of all parameter bytes

so that `step_time` computes the same T_pipe from these parameters as from the layers (tests compare
to 1e-12). Network, γ and ω are not properties of layers, and come from the parameters of a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pipollux_perfmodel.timing.params import (
    CUT_SCHEDULES,
    Checkpoints,
    PerfParams,
    ScheduleKind,
    check_params,
    keeps_most,
    stage_modes,
)
from pipollux_perfmodel.timing.step_time import stage_times

from .chunks import cut_chunks
from .interleaved_memory import interleaved_memory, largest_interleaved_micro_bsz
from .layer_profile import Floats, Layer, LayerProfile, Link, check_balance, stage_ranges
from .memory import largest_micro_bsz, stage_memory
from .partition import partition


@dataclass(frozen=True)
class StagePlan:
    """A cut of a model's layers, with its times and its memory."""

    balance: tuple[int, ...]
    """Number of layers of each stage, K entries; with interleaving of each chunk, K·V entries."""
    perf_params: PerfParams
    profile: LayerProfile
    shards_optimizer: bool = False
    """Whether replicas shard the optimizer's state, so that memory depends on their number."""

    def for_replicas(self, num_replicas: int) -> StagePlan:
        """Return the plan with its memory for a number of replicas."""
        if not self.shards_optimizer:
            return self
        return replace(self, profile=self.profile.sharded(num_replicas))

    def at_level(self, level: int) -> StagePlan:
        """Return the plan for allocations whose nodes meet at a network level."""
        return replace(self, perf_params=self.perf_params.at_level(level))

    @property
    def schedule(self) -> ScheduleKind:
        """The schedule of the step times."""
        return self.perf_params.schedule

    def memory(self, micro_bsz: ArrayLike, num_microbatches: ArrayLike) -> Floats:
        """Return bytes that each stage holds, shape (K, *broadcast shape of b and M). Raises
        ValueError for interleaved stages with several M.
        """
        if self.schedule == "interleaved":
            return interleaved_memory(
                self.profile,
                self.balance,
                self.perf_params.num_stages,
                micro_bsz,
                int(np.asarray(num_microbatches)),
                checkpoint=self.perf_params.checkpoint,
            )
        return stage_memory(
            self.profile,
            self.balance,
            micro_bsz,
            num_microbatches,
            checkpoint=self.perf_params.checkpoint,
            schedule=self.schedule,
        )

    def largest_micro_bsz(self, memory_limit: float, num_microbatches: ArrayLike) -> Floats:
        """Return the most whole samples per micro-batch that fit, of the shape of M."""
        if self.schedule == "interleaved":
            return largest_interleaved_micro_bsz(
                self.profile,
                self.balance,
                self.perf_params.num_stages,
                memory_limit,
                num_microbatches,
                checkpoint=self.perf_params.checkpoint,
            )
        return largest_micro_bsz(
            self.profile,
            self.balance,
            memory_limit,
            num_microbatches,
            checkpoint=self.perf_params.checkpoint,
            schedule=self.schedule,
        )


def plan_stages(
    profile: LayerProfile,
    num_stages: int,
    num_microbatches: int,
    base: PerfParams,
    *,
    micro_bsz: float,
    memory_limit: float | None = None,
    checkpoint: Checkpoints = "never",
    schedule: ScheduleKind | None = None,
    chunks_per_stage: int = 2,
    link: Link | None = None,
    transfers_overlap: bool = True,
) -> StagePlan:
    """Cut the layers with `partition`, and predict its times with `price_stages`; same errors.

    Args:
        profile: costs of the layers.
        num_stages: K.
        num_microbatches: M that the cut is optimized for.
        base: source of network, γ and ω, and of the schedule if none is given.
        micro_bsz: b that the cut is optimized for.
        memory_limit: bytes of each stage's device; None: no limit.
        checkpoint: for all stages or per stage. With different modes, the cut fits even if all
        stages have the mode with the most memory.
        schedule: None: that of `base`, or "1f1b" if that is interleaved.
        chunks_per_stage: V if interleaved; other schedules have one chunk.
        link: link that carries activations over a cut; None: copies are free.
        transfers_overlap: whether copies run concurrently with compute.

    Example:
        >>> profile = LayerProfile.from_layers([Layer(0, 1, 0, 2)] * 4)
        >>> base = PerfParams(0, 3, 0.2, 0.02, 0.05, 0.01, 1.5)
        >>> plan = plan_stages(profile, 2, 8, base, micro_bsz=4)
        >>> plan.balance, plan.perf_params.beta_c
        ((2, 2), 12.0)
    """
    schedule = schedule or _schedule_of(base)
    load: dict[str, Any] = {
        "micro_bsz": micro_bsz,
        "checkpoint": keeps_most(checkpoint),
        "link": link,
        "transfers_overlap": transfers_overlap,
    }
    counts = num_stages, num_microbatches, memory_limit
    if schedule == "interleaved":
        balance = cut_chunks(profile, chunks_per_stage, *counts, **load)
    else:
        balance = partition(profile, *counts, schedule=schedule, **load)
    params = price_stages(
        profile,
        balance,
        base,
        checkpoint=checkpoint,
        schedule=schedule,
        chunks_per_stage=chunks_per_stage if schedule == "interleaved" else 1,
        link=link,
        transfers_overlap=transfers_overlap,
    )
    return StagePlan(tuple(balance), params, profile)


def price_stages(
    profile: LayerProfile,
    balance: Sequence[int],
    base: PerfParams,
    *,
    checkpoint: Checkpoints,
    schedule: ScheduleKind | None = None,
    chunks_per_stage: int = 1,
    link: Link | None = None,
    transfers_overlap: bool = True,
) -> PerfParams:
    """Return the step time parameters of one cut.

    Args:
        profile: costs of the layers.
        balance: number of layers of each stage, K entries; K·V for chunks, chunk q in stage q mod
        K.
        base: source of network, γ, ω, contention, overhead and T_tie; its C(b) is not used.
        checkpoint: the recomputed micro-batches, for all stages or per stage.
        schedule: "gpipe", "1f1b" or "interleaved"; None: that of `base`, or "1f1b" if that is
        interleaved.
        chunks_per_stage: V; a stage's chunks count as equally slow, as do the copies after them.
        link: link that carries activations over a cut; None: copies are free.
        transfers_overlap: whether copies run concurrently with compute, or occupy the receiving
        device.

    Raises:
        ValueError: the balance does not fit the profile, all layer times are 0, or `base`,
        `checkpoint` or `schedule` is out of range.

    Example:
        >>> profile = LayerProfile.from_layers([Layer(0, 1, 0, 2), Layer(0, 1, 0, 4)])
        >>> base = PerfParams(0, 3, 0.2, 0.02, 0.05, 0.01, 1.5)
        >>> price_stages(profile, [1, 1], base, checkpoint="never").backward_shares
        (0.25, 0.5)
    """
    check_balance(balance, profile.num_layers)
    schedule = schedule or _schedule_of(base)
    num_stages, rest = divmod(len(balance), chunks_per_stage)
    if rest or not num_stages:
        raise ValueError(
            f"chunks_per_stage is {chunks_per_stage}; give a number that divides the "
            f"{len(balance)} chunks of the balance"
        )
    alphas = _stage_costs(profile, balance, num_stages, "alpha", checkpoint)
    betas = _stage_costs(profile, balance, num_stages, "beta", checkpoint)
    alpha_c, beta_c = math.fsum(alphas), math.fsum(betas)
    if alpha_c + beta_c == 0:
        raise ValueError("the layers of the profile take no time at all; measure them again")
    alpha_shares = _shares(alphas, alpha_c)
    shares = _shares(betas, beta_c) or alpha_shares
    alpha_t, beta_t = copy_costs(profile, balance, num_stages, link)
    parameters = profile.by_stage("parameter_bytes", balance).reshape(-1, num_stages).sum(0)
    return check_params(
        base._replace(
            alpha_c=alpha_c,
            beta_c=beta_c,
            forward_shares=shares[:num_stages],
            backward_shares=shares[num_stages:],
            forward_alpha_shares=alpha_shares[:num_stages],
            backward_alpha_shares=alpha_shares[num_stages:],
            alpha_t=alpha_t,
            beta_t=beta_t,
            transfers_overlap=transfers_overlap,
            checkpoint=checkpoint,
            schedule=schedule,
            chunks_per_stage=chunks_per_stage,
            gradient_shares=_shares(parameters, math.fsum(parameters)),
            # Layers are lines: fixed and per-sample cost add up.
            gamma_c=1.0,
            tied_exchange=base.tied_exchange if num_stages > 1 else 0.0,
        )
    )


def _schedule_of(base: PerfParams) -> ScheduleKind:
    """Return the schedule for predicting cuts; interleaved stages are not contiguous layers."""
    return base.schedule if base.schedule in CUT_SCHEDULES else "1f1b"


def correct_profile(
    profile: LayerProfile, measured: PerfParams, balance: Sequence[int], micro_bsz: float
) -> LayerProfile:
    """Return the profile with layers scaled to the measured times of their stages.

    Compares forward and backward of each stage at b samples with the profile, and scales the
    stage's layers by the ratio, after subtracting recomputation from the measured backward. If the
    profile has no time to scale, the stage's layers share the measured time evenly, as a fixed
    cost. Bytes stay unchanged.

    Args:
        profile: the profile to correct.
        measured: of the run, with the shares of its stages and its checkpoint mode.
        balance: number of layers of each stage of that run.
        micro_bsz: b of that run.

    Raises:
        ValueError: balance, profile and measured parameters have different stages, or b is not
        above 0.

    Example:
        >>> profile = LayerProfile.from_layers([Layer(0, 1, 0, 2)] * 2)
        >>> slow = PerfParams(0, 9, 0, 0, 0, 0, 1, (1 / 3,), (2 / 3,))
        >>> correct_profile(profile, slow, [2], 4.0).layers[0][:4]
        (0.0, 1.5, 0.0, 3.0)
    """
    check_balance(balance, profile.num_layers)
    if measured.num_stages != len(balance):
        raise ValueError(
            f"measured has {measured.num_stages} stages but balance {list(balance)} has "
            f"{len(balance)}; give the balance of the run that was measured"
        )
    if not (math.isfinite(micro_bsz) and micro_bsz > 0):
        raise ValueError(f"micro_bsz is {micro_bsz}; give finite samples > 0")
    times = stage_times(measured, micro_bsz)
    layers: list[Layer] = []
    modes = stage_modes(measured.checkpoint, measured.num_stages)
    for (start, end), forward, backward, mode in zip(
        stage_ranges(balance), times.forward, times.backward, modes, strict=True
    ):
        if mode != "never":
            backward = max(backward - forward, 0.0)
        part = _scaled(profile.layers[start:end], "forward", float(forward), micro_bsz)
        layers += _scaled(part, "backward", float(backward), micro_bsz)
    return replace(profile, layers=tuple(layers))


def copy_costs(
    profile: LayerProfile, balance: Sequence[int], num_stages: int, link: Link | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return alpha_t and beta_t per boundary of stages, averaged over the copies of chunks.

    >>> profile = LayerProfile.from_layers([Layer(0, 1, 0, 2, output_bytes=8)] * 2)
    >>> copy_costs(profile, [1, 1], 2, Link(0.5, 4.0))
    ((0.5,), (2.0,))
    """
    if link is None:
        return (), ()
    cuts = [end for _, end in stage_ranges(balance)[:-1]]
    crossing = profile.boundary_bytes()[cuts] if cuts else np.zeros(0)
    over = [float(crossing[k::num_stages].mean()) for k in range(num_stages - 1)]
    return (link.latency,) * len(over), tuple(num_bytes / link.bandwidth for num_bytes in over)


def _stage_costs(
    profile: LayerProfile,
    balance: Sequence[int],
    num_stages: int,
    kind: str,
    checkpoint: Checkpoints,
) -> list[float]:
    forward, backward = (
        profile.by_stage(f"{phase}_{kind}", balance).reshape(-1, num_stages).sum(0)
        for phase in ("forward", "backward")
    )
    again = [mode != "never" for mode in stage_modes(checkpoint, num_stages)]
    backward = backward + forward * again
    return [*forward.tolist(), *backward.tolist()]


def _shares(values: Sequence[float] | Floats, total: float) -> tuple[float, ...]:
    return tuple(float(value) / total for value in values) if total > 0 else ()


def _scaled(
    layers: Sequence[Layer], phase: str, seconds: float, micro_bsz: float
) -> tuple[Layer, ...]:
    alpha, beta = f"{phase}_alpha", f"{phase}_beta"
    predicted = math.fsum(getattr(x, alpha) + getattr(x, beta) * micro_bsz for x in layers)
    if predicted == 0:
        return tuple(_changed(layer, {alpha: seconds / len(layers)}) for layer in layers)
    ratio = seconds / predicted
    return tuple(
        _changed(layer, {field: getattr(layer, field) * ratio for field in (alpha, beta)})
        for layer in layers
    )


def _changed(layer: Layer, changes: dict[str, Any]) -> Layer:
    return layer._replace(**changes)
