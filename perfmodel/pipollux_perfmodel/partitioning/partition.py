"""The best contiguous cut of layers into stages.

A list of plain costs is cut to minimize the time of the slowest stage, by dynamic programming over
prefixes in O(K·L²) for L layers:

    best[k][j] = min over i < j of max(best[k-1][i], cost of layers i … j-1)

A `LayerProfile` is cut to minimize GPipe's T_pipe (`timing.gpipe`), with copies at the cuts and a
memory limit (`search`). For 1F1B, `refine` then improves that cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipollux_perfmodel.timing.params import Checkpoint, ScheduleKind

from .layer_profile import Floats, LayerProfile, Link
from .memory import check_choices, check_limit, kept_bytes, range_state_bytes
from .refine import refine_cut
from .search import Bools, CutCosts, find_cut, least_rest

_ROUNDING = 1e-12


def partition(
    profile_or_costs: LayerProfile | Sequence[float],
    num_stages: int,
    num_microbatches: int = 1,
    memory_limit: float | None = None,
    *,
    micro_bsz: float = 1.0,
    checkpoint: Checkpoint = "never",
    schedule: ScheduleKind = "gpipe",
    link: Link | None = None,
    transfers_overlap: bool = True,
) -> list[int]:
    """Cut layers into stages for the fastest pipeline.

    Args:
        profile_or_costs: costs of the layers; or seconds of each layer (in any unit), cut to
        minimize the slowest stage for any M, without memory or copies.
        num_stages: number of stages; each gets at least one layer.
        num_microbatches: M. With one micro-batch all cuts take the same time except for copies; the
        best balanced one is chosen.
        memory_limit: bytes of each stage's device; None: no limit.
        micro_bsz: b, samples per micro-batch.
        checkpoint: the recomputed micro-batches.
        schedule: "gpipe" or "1f1b".
        link: link that carries activations over a cut; None: copies are free.
        transfers_overlap: whether copies run concurrently with compute, or occupy the receiver.

    Returns:
        The number of layers of each stage, in order (torchgpipe's `balance`). For GPipe it is
        optimal up to rounding. For 1F1B it is at least as fast as GPipe's best cut, and usually
        optimal.

    Raises:
        ValueError: there are fewer layers than stages, an argument is out of range, plain costs are
        given with a limit or a link, or no cut fits the memory limit.

    Example:
        >>> partition([1, 1, 1, 3], 2)
        [3, 1]
        >>> from pipollux_perfmodel.partitioning.layer_profile import Layer
        >>> profile = LayerProfile.from_layers([Layer(0, 1, 0, 2, activation_bytes=9)] * 4)
        >>> partition(profile, 2, num_microbatches=4, memory_limit=72)
        [2, 2]
    """
    if num_stages < 1:
        raise ValueError(f"num_stages is {num_stages}; give at least one stage")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches is {num_microbatches}; give at least one")
    check_choices(checkpoint, schedule)
    if not isinstance(profile_or_costs, LayerProfile):
        if memory_limit is not None or link is not None:
            name = "link" if memory_limit is None else "memory_limit"
            raise ValueError(f"{name} is given with plain costs; give a LayerProfile with it")
        return _partition_costs(profile_or_costs, num_stages)
    _check_count(profile_or_costs.num_layers, num_stages)
    if not (math.isfinite(micro_bsz) and micro_bsz > 0):
        raise ValueError(f"micro_bsz is {micro_bsz}; give finite samples > 0")
    run = _Run(num_stages, num_microbatches, micro_bsz, checkpoint, schedule)
    costs = _cut_costs(profile_or_costs, run, link, transfers_overlap)
    possible = _upper_triangle(profile_or_costs.num_layers)
    if memory_limit is None:
        allowed = [possible] * num_stages
    else:
        check_limit(memory_limit)
        memory = _stage_memories(profile_or_costs, run, possible)
        allowed = _that_fit(memory, memory_limit)
    ends = find_cut(costs, allowed)
    if ends is None:
        assert memory_limit is not None  # noqa: S101  # without one, L >= K layers have a cut
        raise ValueError(_nothing_fits(memory_limit, least_rest(memory)[-1][0], run))
    if schedule == "1f1b":
        ends = refine_cut(costs, allowed, ends)
    return [end - start for start, end in itertools.pairwise(ends)]


def least_memory(
    profile: LayerProfile,
    num_stages: int,
    num_microbatches: int = 1,
    *,
    micro_bsz: float = 1.0,
    checkpoint: Checkpoint = "never",
    schedule: ScheduleKind = "gpipe",
) -> float:
    """Return the bytes of the largest stage in the cut that minimizes them.

    Passed to `partition` as the memory limit, it selects the fastest of those cuts.

    Args:
        profile: the costs of the layers.
        num_stages: number of stages; each gets at least one layer.
        num_microbatches: M.
        micro_bsz: b, samples per micro-batch.
        checkpoint: the recomputed micro-batches.
        schedule: "gpipe" or "1f1b".

    Raises:
        ValueError: when there are fewer layers than stages, or an argument is out of range.

    Example:
        >>> from pipollux_perfmodel.partitioning.layer_profile import Layer
        >>> sizes = [Layer(0, 1, 0, 2, parameter_bytes=size) for size in (8, 1, 1, 2)]
        >>> least_memory(LayerProfile.from_layers(sizes), 2)
        16.0
    """
    if num_stages < 1:
        raise ValueError(f"num_stages is {num_stages}; give at least one stage")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches is {num_microbatches}; give at least one")
    check_choices(checkpoint, schedule)
    _check_count(profile.num_layers, num_stages)
    run = _Run(num_stages, num_microbatches, micro_bsz, checkpoint, schedule)
    memories = _stage_memories(profile, run, _upper_triangle(profile.num_layers))
    return float(least_rest(memories)[-1][0])


@dataclass(frozen=True)
class _Run:
    num_stages: int
    num_microbatches: int
    micro_bsz: float
    checkpoint: Checkpoint
    schedule: ScheduleKind

    @property
    def recomputes(self) -> bool:
        several = self.num_microbatches > 1
        return self.checkpoint == "always" or (self.checkpoint == "except_last" and several)


def _cut_costs(profile: LayerProfile, run: _Run, link: Link | None, overlapping: bool) -> CutCosts:
    forward = profile.forward_seconds(run.micro_bsz)
    kept = profile.backward_seconds(run.micro_bsz)
    backward = kept + forward if run.recomputes else kept
    one_shorter = run.recomputes and run.checkpoint == "except_last"
    copies = np.zeros(profile.num_layers + 1)
    if link is not None:
        copies[1:-1] = link.seconds(profile.boundary_bytes()[1:-1] * run.micro_bsz)
    last = kept if one_shorter else backward
    return CutCosts(forward, backward, last, copies, overlapping, run.num_microbatches, one_shorter)


def _stage_memories(profile: LayerProfile, run: _Run, possible: Bools) -> list[Floats]:
    """Return bytes of layers i to j - 1 as the stage with 1, 2, … stages left; (L+1, L+1) each."""
    kept = np.concatenate(([0.0], np.cumsum(profile.column("activation_bytes"))))
    fixed, activations = range_state_bytes(profile), kept - kept[:, None]
    inputs = profile.boundary_bytes()[:, None]
    memories: list[Floats] = []
    for left in range(1, run.num_stages + 1):
        if memories and (run.schedule == "gpipe" or left > run.num_microbatches):
            memories.append(memories[-1])
            continue
        per_sample = kept_bytes(
            inputs, activations, run.num_microbatches, left, run.checkpoint, run.schedule
        )
        memories.append(np.where(possible, fixed + per_sample * run.micro_bsz, np.inf))
    return memories


def _that_fit(memories: Sequence[Floats], memory_limit: float) -> list[Bools]:
    fits: dict[int, Bools] = {}
    for memory in memories:
        if id(memory) not in fits:
            fits[id(memory)] = memory <= memory_limit * (1 + _ROUNDING)
    return [fits[id(memory)] for memory in memories]


def _upper_triangle(num_layers: int) -> Bools:
    position = np.arange(num_layers + 1)
    return np.asarray(position[:, None] < position)


def _nothing_fits(memory_limit: float, least: float, run: _Run) -> str:
    recompute = "" if run.checkpoint == "always" else ', or activation_checkpoint="always"'
    return (
        f"memory_limit is {memory_limit:.10g} bytes but {run.num_stages} stages need at least "
        f"{least:.10g} on one device with {run.num_microbatches} micro-batches of "
        f"{run.micro_bsz:g} samples; give more stages or smaller micro-batches{recompute}"
    )


def _partition_costs(costs: Sequence[float], num_stages: int) -> list[int]:
    _check_count(len(costs), num_stages)
    for layer, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"costs[{layer}] is {cost}; give a finite cost >= 0")
    num_layers = len(costs)
    prefix = np.concatenate(([0.0], np.cumsum(np.asarray(costs, dtype=float))))
    best: NDArray[np.float64] = prefix.copy()
    best[0] = np.inf
    cuts: list[NDArray[np.int64]] = []
    for stage in range(2, num_stages + 1):
        best, cut = _add_stage(best, prefix, stage)
        cuts.append(cut)
    ends = [num_layers]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    ends.append(0)
    ends.reverse()
    return [end - start for start, end in itertools.pairwise(ends)]


def _add_stage(
    best: NDArray[np.float64], prefix: NDArray[np.float64], stage: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return, per prefix, the slowest of `stage` stages and the start of the last one."""
    longer = np.full_like(best, np.inf)
    cut = np.zeros(len(best), dtype=np.int64)
    for end in range(stage, len(best)):
        slowest = np.maximum(best[stage - 1 : end], prefix[end] - prefix[stage - 1 : end])
        start = int(np.argmin(slowest))
        longer[end], cut[end] = slowest[start], start + stage - 1
    return longer, cut


def _check_count(num_layers: int, num_stages: int) -> None:
    if num_layers < num_stages:
        raise ValueError(
            f"num_stages is {num_stages} but there are {num_layers} layers; "
            "give at most one stage per layer"
        )
