"""Cuts of the layers into the chunks of interleaved stages.

K stages of V chunks are K·V contiguous parts of the layers, part q in stage q mod K (Narayanan et
al., SC'21, section 2.2). There are two candidates: the fastest pipeline of K·V parts, whose parts
take about equal time, and the cut that minimizes the memory of the largest part. The memory of a
stage's chunks together is not considered, so another cut may fit where neither does.
"""

from __future__ import annotations

from typing import Any

from pipollux_perfmodel.timing.params import Checkpoint

from .interleaved_memory import interleaved_memory
from .layer_profile import LayerProfile, Link
from .partition import least_memory, partition

_ROUNDING = 1e-12


def chunk_cuts(
    profile: LayerProfile,
    chunks_per_stage: int,
    num_stages: int,
    num_microbatches: int,
    *,
    micro_bsz: float = 1.0,
    checkpoint: Checkpoint = "never",
    link: Link | None = None,
    transfers_overlap: bool = True,
) -> tuple[list[int], list[int]]:
    """Return the numbers of layers of K·V chunks: cut by time, and cut by memory.

    Args:
        profile: costs of the layers.
        chunks_per_stage: V.
        num_stages: K.
        num_microbatches: M.
        micro_bsz: b, samples per micro-batch.
        checkpoint: the recomputed micro-batches.
        link: link that carries activations over a cut; None: copies are free.
        transfers_overlap: whether copies run concurrently with compute.

    Raises:
        ValueError: as `partition`, also when there are fewer layers than chunks.

    Example:
        >>> from pipollux_perfmodel.partitioning.layer_profile import Layer
        >>> profile = LayerProfile.from_layers([Layer(0, 1, 0, 2)] * 8)
        >>> chunk_cuts(profile, 2, 2, 4)[0]
        [2, 2, 2, 2]
    """
    parts = _num_parts(chunks_per_stage, num_stages)
    load: dict[str, Any] = {"micro_bsz": micro_bsz, "checkpoint": checkpoint}
    copies: dict[str, Any] = {"link": link, "transfers_overlap": transfers_overlap}
    least = least_memory(profile, parts, num_microbatches, **load)
    fastest = partition(profile, parts, num_microbatches, **load, **copies)
    return fastest, partition(profile, parts, num_microbatches, least or None, **load, **copies)


def cut_chunks(
    profile: LayerProfile,
    chunks_per_stage: int,
    num_stages: int,
    num_microbatches: int,
    memory_limit: float | None = None,
    *,
    micro_bsz: float = 1.0,
    checkpoint: Checkpoint = "never",
    link: Link | None = None,
    transfers_overlap: bool = True,
) -> list[int]:
    """Return the first of `chunk_cuts` that fits.

    Args:
        profile: costs of the layers.
        chunks_per_stage: V.
        num_stages: K.
        num_microbatches: M.
        memory_limit: bytes of each stage's device; None: no limit.
        micro_bsz: b, samples per micro-batch.
        checkpoint: the recomputed micro-batches.
        link: link that carries activations over a cut; None: copies are free.
        transfers_overlap: whether copies run concurrently with compute.

    Raises:
        ValueError: as `chunk_cuts`, or when neither fits the memory limit.

    Example:
        >>> from pipollux_perfmodel.partitioning.layer_profile import Layer
        >>> profile = LayerProfile.from_layers([Layer(0, 1, 0, 2, activation_bytes=1)] * 4)
        >>> cut_chunks(profile, 2, 2, 4, memory_limit=5.0)
        [1, 1, 1, 1]
    """
    cuts = chunk_cuts(
        profile,
        chunks_per_stage,
        num_stages,
        num_microbatches,
        micro_bsz=micro_bsz,
        checkpoint=checkpoint,
        link=link,
        transfers_overlap=transfers_overlap,
    )
    if memory_limit is None:
        return cuts[0]
    needed = [
        float(
            interleaved_memory(
                profile, cut, num_stages, micro_bsz, num_microbatches, checkpoint=checkpoint
            ).max()
        )
        for cut in cuts
    ]
    for cut, most in zip(cuts, needed, strict=True):
        if most <= memory_limit * (1 + _ROUNDING):
            return cut
    raise ValueError(
        f"memory_limit is {memory_limit:.10g} bytes but {num_stages} stages of {chunks_per_stage} "
        f"interleaved chunks need {min(needed):.10g} on one device with {num_microbatches} "
        f"micro-batches of {micro_bsz:g} samples; give more stages, smaller micro-batches or "
        "schedule '1f1b', which keeps less"
    )


def least_interleaved_memory(
    profile: LayerProfile,
    chunks_per_stage: int,
    num_stages: int,
    num_microbatches: int,
    *,
    micro_bsz: float = 1.0,
    checkpoint: Checkpoint = "never",
) -> float:
    """Return the bytes of the fullest device in the more compact of the two `chunk_cuts`.

    >>> from pipollux_perfmodel.partitioning.layer_profile import Layer
    >>> profile = LayerProfile.from_layers([Layer(0, 1, 0, 2, activation_bytes=1)] * 8)
    >>> least_interleaved_memory(profile, 2, 2, 8)
    10.0
    """
    load: dict[str, Any] = {"micro_bsz": micro_bsz, "checkpoint": checkpoint}
    cuts = chunk_cuts(profile, chunks_per_stage, num_stages, num_microbatches, **load)
    return min(
        float(
            interleaved_memory(
                profile, cut, num_stages, micro_bsz, num_microbatches, checkpoint=checkpoint
            ).max()
        )
        for cut in cuts
    )


def _num_parts(chunks_per_stage: int, num_stages: int) -> int:
    if num_stages < 1 or chunks_per_stage < 1:
        raise ValueError(
            f"num_stages is {num_stages} and chunks_per_stage {chunks_per_stage}; give at least "
            "one of each"
        )
    return num_stages * chunks_per_stage
