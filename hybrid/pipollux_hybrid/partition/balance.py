"""Cut of the layers into stages, within the memory of the devices."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.pipeline.microbatch import num_samples
from pipollux_perfmodel import (
    LayerProfile,
    chunk_cuts,
    interleaved_memory,
    least_memory,
    partition,
    stage_memory,
)
from pipollux_perfmodel.timing.params import Checkpoints, ScheduleKind, keeps_most

from .layer_profiler import profile_layers
from .tied_parameters import (
    TiedParameters,
    blocks_of,
    check_chunks,
    check_ties,
    find_ties,
    merge_layers,
)

__all__ = [
    "MeasuredLayers",
    "PartitionRequest",
    "Partitioning",
    "choose_balance",
    "measure_layers",
]

DEVICE_SHARE = 0.9
"""Share of a GPU's memory for stages; the rest is for kernels, copies and fragmentation."""


@dataclass(frozen=True, kw_only=True)
class PartitionRequest:
    """The user's constraints on a cut."""

    num_stages: int
    balance: Sequence[int] | str | None
    """Layers of each stage, or the quantity to balance: ``time``, ``memory``, ``parameters``."""
    example_inputs: Any = None
    num_microbatches: int = 1
    checkpoint: Checkpoints = "never"
    schedule: ScheduleKind = "gpipe"
    ties_apart: bool = False
    """Whether stages may share a parameter, as in a multi-process pipeline."""
    chunks_per_stage: int = 1
    """V; the layers are cut into K·V parts, part q in stage q mod K."""
    memory_limit: float | None = None
    """Bytes of each device; None: a GPU's memory less a margin, no limit on a CPU."""
    shards_optimizer: bool = False
    """Whether the processes of a stage in all replicas shard its optimizer state."""

    @property
    def num_parts(self) -> int:
        """K·V."""
        return self.num_stages * self.chunks_per_stage

    @property
    def wish(self) -> str:
        """The requested number of parts, for messages."""
        more = f", chunks_per_stage={self.chunks_per_stage}" if self.chunks_per_stage > 1 else ""
        return f"num_stages={self.num_stages}{more}"

    @property
    def rule(self) -> str | None:
        """The quantity to balance; None if the balance is given."""
        if isinstance(self.balance, str):
            return self.balance
        if self.balance is not None:
            return None
        return "parameters" if self.example_inputs is None else "time"

    @property
    def num_samples(self) -> int:
        """Samples of the example inputs, processed by a replica at once."""
        return num_samples(self.example_inputs)


class MeasuredLayers(NamedTuple):
    """Measurements of layers and devices before a cut is chosen."""

    profile: LayerProfile | None = None
    """Costs of the layers; None without example inputs."""
    memory_limit: float | None = None
    """Bytes of a device available to stages; None: unbounded, or without example inputs."""


class Partitioning(NamedTuple):
    """The cut of the layers, and its basis."""

    balance: list[int]
    """Layers of each stage, or of each chunk."""
    profile: LayerProfile | None
    memory_limit: float | None
    blocks: list[int]
    """Number of layers of each block that must stay in one stage."""

    def in_blocks(self) -> tuple[LayerProfile, tuple[int, ...]] | None:
        """Return the blocks' costs, and their number per stage; None without example inputs."""
        if self.profile is None:
            return None
        ends = list(itertools.accumulate(self.blocks))
        cuts = [0, *(ends.index(end) + 1 for end in itertools.accumulate(self.balance))]
        counts = tuple(end - start for start, end in itertools.pairwise(cuts))
        return merge_layers(self.profile, self.blocks), counts


def measure_layers(
    ctx: JobContext,
    module: nn.Sequential,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    request: PartitionRequest,
) -> MeasuredLayers:
    """Return the layers' profile if there are example inputs, and the memory limit, as rank 0
    measures them. Raises a ConfigurationError if the constraints are inconsistent, or the layers
    cannot be measured.
    """
    _check_limit(request)
    if request.example_inputs is None or ctx.joins is not None:
        return MeasuredLayers()
    profile = _agreed_profile(ctx, module, optimizer, device, request.example_inputs)
    if request.shards_optimizer:
        profile = profile.sharded(ctx.env.num_replicas)
    return MeasuredLayers(profile, _limit(ctx, request, device))


def choose_balance(
    ctx: JobContext, module: nn.Sequential, request: PartitionRequest, measured: MeasuredLayers
) -> Partitioning:
    """Return the layers of each stage; the same on all replicas.

    Without a given balance it is the best contiguous cut (:func:`pipollux_perfmodel.partition`) by
    the requested quantity, among cuts that keep tied layers together and fit the devices. Raises a
    ConfigurationError if the constraints contradict each other, the layers or the memory.
    """
    ties, given = [] if request.ties_apart else find_ties(module), request.rule is None
    blocks = blocks_of(ties, len(module))
    if ctx.joins is not None:  # the surviving replicas have decided
        balance = _of_job(ctx.joins.balance, request, len(module))
        return Partitioning(balance, None, None, blocks)
    if given:
        balance = _checked(request.balance, request, len(module))
        check_ties(ties, balance)
    else:
        _check_count(ties, request, len(module))
    profile, limit = measured
    if given:
        _check_memory(profile, balance, request, limit)
    else:
        ends = iter(blocks)
        counts = _cut(module, profile, blocks, request, limit)
        balance = [sum(next(ends) for _ in range(count)) for count in counts]
    if request.chunks_per_stage > 1:
        check_chunks(find_ties(module), balance, request.num_stages)
    return Partitioning(balance, profile, limit, blocks)


def _cut(
    module: nn.Sequential,
    profile: LayerProfile | None,
    blocks: Sequence[int],
    request: PartitionRequest,
    limit: float | None,
) -> list[int]:
    if profile is None:
        return partition(_sums(_sizes(module), blocks), request.num_parts)
    merged, microbatches = merge_layers(profile, blocks), request.num_microbatches
    options: dict[str, Any] = {
        "micro_bsz": request.num_samples / microbatches,
        "checkpoint": keeps_most(request.checkpoint),
        "schedule": request.schedule,
    }
    try:
        if request.chunks_per_stage > 1:
            return _cut_chunks(merged, request, limit)
        # Every balance has to fit the memory.
        fastest = partition(merged, request.num_stages, microbatches, limit, **options)
        if request.rule == "time":
            return fastest
        if request.rule == "memory":
            least = least_memory(merged, request.num_stages, microbatches, **options)
            return partition(merged, request.num_stages, microbatches, least, **options)
        counts = partition(_sums(_sizes(module), blocks), request.num_stages)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    _check_memory(merged, counts, request, limit)
    return counts


def _cut_chunks(merged: LayerProfile, request: PartitionRequest, limit: float | None) -> list[int]:
    """Return the number of blocks of each chunk, as equally slow as possible within the memory."""
    samples = request.num_samples / request.num_microbatches
    most = keeps_most(request.checkpoint)
    options: dict[str, Any] = {"micro_bsz": samples, "checkpoint": most}
    chunks, stages = request.chunks_per_stage, request.num_stages
    cuts = [*chunk_cuts(merged, chunks, stages, request.num_microbatches, **options)]
    if request.rule == "memory":
        cuts.reverse()
    elif request.rule == "parameters":
        sizes = (merged.column("parameter_bytes") + 1.0).tolist()
        cuts = [partition(sizes, request.num_parts)]
    fits = (cut for cut in cuts if limit is None or _memory(merged, cut, request).max() <= limit)
    chosen = next(fits, cuts[-1])
    _check_memory(merged, chosen, request, limit)
    return chosen


def _memory(
    profile: LayerProfile, balance: Sequence[int], request: PartitionRequest
) -> NDArray[np.float64]:
    """Return the bytes of the example batch on each stage's device, K entries."""
    checkpoint = request.checkpoint
    microbatches, samples = request.num_microbatches, request.num_samples / request.num_microbatches
    if request.chunks_per_stage > 1:
        stages = request.num_stages
        return interleaved_memory(
            profile, balance, stages, samples, microbatches, checkpoint=checkpoint
        )
    schedule = request.schedule
    return stage_memory(
        profile, balance, samples, microbatches, checkpoint=checkpoint, schedule=schedule
    )


def _check_memory(
    profile: LayerProfile | None,
    balance: Sequence[int],
    request: PartitionRequest,
    limit: float | None,
) -> None:
    if profile is None or limit is None:
        return
    samples = request.num_samples / request.num_microbatches
    needed = _memory(profile, balance, request)
    stage = int(needed.argmax())
    if needed[stage] > limit:
        raise ConfigurationError(
            f"balance={list(balance)}: stage {stage} needs {needed[stage]:.4g} bytes with "
            f"{request.num_microbatches} micro-batches of {samples:g} samples, and memory_limit is "
            f"{limit:.4g}; leave balance out to have one chosen that fits, or give more stages, "
            'smaller micro-batches or activation_checkpoint="always"'
        )


def _check_limit(request: PartitionRequest) -> None:
    limit = request.memory_limit
    needs = (
        "memory_limit"
        if limit is not None
        else f"balance={request.rule!r}"
        if request.rule in ("time", "memory")
        else None
    )
    if needs is not None and request.example_inputs is None:
        raise ConfigurationError(
            f"{needs} needs to know what the layers take: pass example_inputs=, a batch of inputs"
        )
    if limit is not None and not (math.isfinite(limit) and limit > 0):
        raise ConfigurationError(f"memory_limit={limit}: bytes above 0 are needed, or None")


def _limit(ctx: JobContext, request: PartitionRequest, device: torch.device) -> float | None:
    """Return the bytes of a device; of the smallest if replicas differ."""
    limit = math.inf if request.memory_limit is None else request.memory_limit
    if request.memory_limit is None and device.type == "cuda":
        limit = DEVICE_SHARE * float(torch.cuda.get_device_properties(device).total_memory)
    everyones = ctx.control.gather(torch.tensor([limit], dtype=torch.float64))
    least = min(float(other) for other in everyones)
    return least if math.isfinite(least) else None


def _agreed_profile(
    ctx: JobContext,
    module: nn.Sequential,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    example_inputs: Any,
) -> LayerProfile:
    """Return rank 0's profile: with different times, replicas would choose different cuts."""
    answer: dict[str, Any] = {}
    if ctx.env.leads:
        try:
            profile = profile_layers(module, example_inputs, optimizer=optimizer, device=device)
            answer = {"profile": profile.to_json_object()}
        except ConfigurationError as error:
            answer = {"error": str(error)}  # the other ranks wait for an answer
    content = json.dumps(answer).encode()
    length = int(ctx.control.gather(torch.tensor([len(content)]))[0])
    padded = bytearray(content[:length].ljust(length))
    shared = ctx.control.gather(torch.frombuffer(padded, dtype=torch.uint8))[0]
    answer = json.loads(bytes(shared.tolist()))
    if "error" in answer:
        raise ConfigurationError(str(answer["error"]))
    return LayerProfile.from_json_object(answer["profile"])


def _sizes(module: nn.Sequential) -> list[float]:
    """Return the parameters of each layer plus one, which spreads layers without parameters."""
    return [1.0 + sum(p.numel() for p in layer.parameters()) for layer in module]


def _sums(costs: Sequence[float], blocks: Sequence[int]) -> list[float]:
    rest = iter(costs)
    return [sum(next(rest) for _ in range(count)) for count in blocks]


def _check_count(
    ties: Sequence[TiedParameters], request: PartitionRequest, num_layers: int
) -> None:
    if request.num_parts > num_layers:
        part = "stage" if request.chunks_per_stage == 1 else "chunk of a stage"
        raise ConfigurationError(
            f"{request.wish}: the module has only {num_layers} layers, and each {part} "
            "needs one; ask for fewer stages or cut the module into more layers"
        )
    most = len(blocks_of(ties, num_layers))
    if request.num_parts > most:
        tied = "; ".join(map(str, ties))
        raise ConfigurationError(
            f"{request.wish}: {tied}, and must be on one stage, so there can be at most {most} "
            "stages; ask for fewer, untie them, or use a multi-process pipeline (schedule=)"
        )


def _of_job(theirs: Sequence[int], request: PartitionRequest, num_layers: int) -> list[int]:
    """Return the job's balance; a ConfigurationError if this replica's layers or stages differ."""
    if sum(theirs) != num_layers:
        raise ConfigurationError(
            f"this replica cannot join the job: its module has {num_layers} layers, and that of "
            f"the job has {sum(theirs)}; start it with the same script and arguments"
        )
    if len(theirs) != request.num_parts:
        chunks = f" of {request.chunks_per_stage} chunks each" * (request.chunks_per_stage > 1)
        raise ConfigurationError(
            f"this replica cannot join the job: it asks for num_stages={request.num_stages}"
            f"{chunks}, and the layers of the job are cut as {list(theirs)}; start it with the "
            "same num_stages (or PIPOLLUX_NUM_STAGES), script and arguments"
        )
    return list(theirs)


def _checked(given: Any, request: PartitionRequest, num_layers: int) -> list[int]:
    balance = list(given)
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in balance):
        raise ConfigurationError(f"balance={balance}: each stage needs at least one layer")
    if sum(balance) != num_layers:
        raise ConfigurationError(
            f"balance={balance} covers {sum(balance)} layers, the module has {num_layers}"
        )
    if len(balance) != request.num_parts:
        several = request.chunks_per_stage
        stages = f"{request.num_stages} were" if several == 1 else f"{request.wish} was"
        raise ConfigurationError(
            f"balance={balance} makes {len(balance)} {'stages' if several == 1 else 'chunks'}, but "
            f"{stages} asked for (num_stages, or PIPOLLUX_NUM_STAGES from the scheduler): leave "
            "balance out to have it chosen"
        )
    return balance
