"""Memory of each stage's device, and the largest micro-batch that fits; arguments broadcast.

A stage holds its parameters, gradients of the same size, a copy of the gradients for other
replicas, the optimizer's state, and the activations of c micro-batches in flight, whose forward is
done and whose backward is not. With M micro-batches, K stages, and stage k counted from 0:

    GPipe   all forwards come before all backwards:              c = M
    1F1B    a stage goes back as soon as it can:                 c = min(M, K - k)

If replicas shard the optimizer's state (`LayerProfile.optimizer_shards`), it is the maximum that
one replica may hold (`largest_share`), where a layer's state counts as that of one parameter.

Per sample, autograd keeps A bytes for the stage, whose input has I bytes. Kept per sample:

    never          c·A
    always         c·I + A                        all inputs, and the recomputed micro-batch
    except_last    GPipe  (M - 1)·I + A           the last micro-batch frees its activations before
                                                  the first recomputation
                   1F1B   (c - 1)·I + A + max(A, I) for c > 1: the last backward is that of the last
                          micro-batch, so it coexists with a recomputed one; I + A for c = 1
                   A for M = 1, as nothing is recomputed

GPipe has torchgpipe's order; torch's, in a multi-process pipeline, runs the last micro-batch's
backward last, so under except_last the stage needs A more. 1F1B is PipeDream-Flush's (Narayanan et
al., ICML'21); interleaved 1F1B has no closed form (`interleaved_memory`). Not included, so leave a
margin in the limit: workspace of kernels, boundary buffers in flight, and fragmentation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pipollux_perfmodel.timing.params import (
    CHECKPOINTS,
    CUT_SCHEDULES,
    Checkpoint,
    Checkpoints,
    ScheduleKind,
    stage_modes,
)

from .layer_profile import Floats, LayerProfile, check_balance, stage_ranges

_ROUNDING = 1e-12


def stage_memory(
    profile: LayerProfile,
    balance: Sequence[int],
    micro_bsz: ArrayLike,
    num_microbatches: ArrayLike,
    *,
    checkpoint: Checkpoints = "never",
    schedule: ScheduleKind = "gpipe",
) -> Floats:
    """Return the maximum bytes of each stage.

    Args:
        profile: the costs of the layers.
        balance: number of layers of each stage, K entries.
        micro_bsz: b, samples per micro-batch; any shape.
        num_microbatches: M; any shape that broadcasts with `micro_bsz`.
        checkpoint: the recomputed micro-batches, for all stages or per stage.
        schedule: "gpipe" or "1f1b".

    Returns:
        Bytes, shape (K, *broadcast shape of b and M).

    Raises:
        ValueError: when the balance does not fit the profile, b is negative or not finite, M below
            1, or checkpoint or schedule unknown.

    Example:
        >>> from pipollux_perfmodel.partitioning.layer_profile import Layer
        >>> layer = Layer(0, 1, 0, 2, parameter_bytes=10, optimizer_bytes=20, activation_bytes=3)
        >>> stage_memory(LayerProfile((layer, layer)), [1, 1], 4.0, [1, 2]).tolist()
        [[52.0, 64.0], [52.0, 64.0]]
    """
    _check_schedule(schedule)
    samples, count = np.broadcast_arrays(
        np.asarray(micro_bsz, float), np.asarray(num_microbatches, float)
    )
    checked_samples(samples)
    fixed, per_sample = _stage_bytes(profile, balance, count, checkpoint, schedule)
    return np.asarray(fixed + per_sample * samples)


def largest_micro_bsz(
    profile: LayerProfile,
    balance: Sequence[int],
    memory_limit: float,
    num_microbatches: ArrayLike,
    *,
    checkpoint: Checkpoints = "never",
    schedule: ScheduleKind = "gpipe",
) -> Floats:
    """Return the most whole samples per micro-batch that fit every stage.

    Args:
        profile: the costs of the layers.
        balance: number of layers of each stage, K entries.
        memory_limit: bytes of each stage's device.
        num_microbatches: M; any shape.
        checkpoint: the recomputed micro-batches, for all stages or per stage.
        schedule: "gpipe" or "1f1b".

    Returns:
        Floats of the shape of M: 0 if no sample fits, infinity if samples take no memory.

    Raises:
        ValueError: as `stage_memory`, or when the limit is not above 0.

    Example:
        >>> from pipollux_perfmodel.partitioning.layer_profile import Layer
        >>> layer = Layer(0, 1, 0, 2, parameter_bytes=10, activation_bytes=3)
        >>> largest_micro_bsz(LayerProfile((layer, layer)), [1, 1], 50.0, [1, 2]).tolist()
        [10.0, 5.0]
    """
    _check_schedule(schedule)
    check_limit(memory_limit)
    count = np.asarray(num_microbatches, float)
    fixed, per_sample = _stage_bytes(profile, balance, count, checkpoint, schedule)
    return most_samples(fixed, per_sample, memory_limit)


def kept_bytes(
    input_bytes: Any,
    activation_bytes: Any,
    num_microbatches: Any,
    stages_left: Any,
    checkpoint: Checkpoint,
    schedule: ScheduleKind,
) -> Floats:
    """Return the maximum bytes per sample of a stage, by the table above; arguments broadcast.
    `input_bytes` is I, `activation_bytes` A, and `stages_left` K - k.
    """
    inputs, full, M = (np.asarray(x) for x in (input_bytes, activation_bytes, num_microbatches))
    in_flight = M if schedule == "gpipe" else np.minimum(M, stages_left)
    if checkpoint == "never":
        return np.asarray(in_flight * full)
    if checkpoint == "always":
        return np.asarray(in_flight * inputs + full)
    if schedule == "gpipe":
        return np.asarray((M - 1) * inputs + full)
    several = (in_flight - 1) * inputs + full + np.maximum(full, inputs)
    one = full + np.where(M > 1, inputs, 0)
    return np.asarray(np.where(in_flight > 1, several, one))


def state_bytes(profile: LayerProfile) -> Floats:
    """Return bytes of parameters, gradients and whole optimizer state by layer, shape (L,)."""
    return 2 * profile.column("parameter_bytes") + profile.column("optimizer_bytes")


def _undivided_bytes(profile: LayerProfile) -> Floats:
    """Return bytes of parameters, gradients and their copies by layer, shape (L,)."""
    return np.asarray(2 * profile.column("parameter_bytes") + profile.column("copy_bytes"))


def largest_share(whole: Any, largest: Any, num_shards: int) -> Floats:
    """Return the most that one replica may hold of an optimizer's state sharded among R.

    Parameters are assigned whole, the largest first, each to the replica with the least bytes.
    Before its last parameter the fullest replica had at most the average of the others, so it holds
    at most S/R + (1 - 1/R)·p (Graham, 1969): of all of S, and the largest p, or a bound of it.

    >>> float(largest_share(100.0, 10.0, 4))
    32.5
    """
    share = np.asarray(whole) / num_shards + (1 - 1 / num_shards) * np.asarray(largest)
    return np.asarray(np.minimum(whole, share))


def range_state_bytes(profile: LayerProfile) -> Floats:
    """Return bytes of layers i to j - 1 independent of the batch, shape (L + 1, L + 1). A sharded
    state counts as `largest_share`. Values below the diagonal are undefined.
    """
    optimizer = profile.column("optimizer_bytes")
    plain, whole = (
        (sums := np.concatenate(([0.0], np.cumsum(each)))) - sums[:, None]
        for each in (_undivided_bytes(profile), optimizer)
    )
    if profile.optimizer_shards == 1:
        return np.asarray(plain + whole)
    largest = np.zeros_like(whole)
    for start in range(profile.num_layers):
        largest[start, start + 1 :] = np.maximum.accumulate(optimizer[start:])
    return np.asarray(plain + largest_share(whole, largest, profile.optimizer_shards))


def held_state(profile: LayerProfile, balance: Sequence[int], num_devices: int) -> Floats:
    """Return bytes of each device independent of the batch, shape (num_devices,)."""
    starts = [start for start, _ in stage_ranges(balance)]
    optimizer = profile.column("optimizer_bytes")
    plain, whole = (
        np.add.reduceat(each, starts).reshape(-1, num_devices).sum(0)
        for each in (_undivided_bytes(profile), optimizer)
    )
    largest = np.maximum.reduceat(optimizer, starts).reshape(-1, num_devices).max(0)
    return np.asarray(plain + largest_share(whole, largest, profile.optimizer_shards))


def check_choices(checkpoint: str, schedule: str) -> None:
    """Raise ValueError for unknown checkpoint modes and schedules."""
    if checkpoint not in CHECKPOINTS:
        raise ValueError(f"checkpoint is {checkpoint!r}; give one of {CHECKPOINTS}")
    _check_schedule(schedule)


def _check_schedule(schedule: str) -> None:
    if schedule not in CUT_SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; give one of {CUT_SCHEDULES}")


def check_limit(memory_limit: float) -> None:
    """Raise ValueError for a memory limit that is not a finite number of bytes above 0."""
    if not (math.isfinite(memory_limit) and memory_limit > 0):
        raise ValueError(f"memory_limit is {memory_limit}; give finite bytes > 0, or None")


def checked_samples(samples: Floats) -> Floats:
    """Return samples per micro-batch; ValueError if a value is negative or not finite."""
    if not np.all(np.isfinite(samples) & (samples >= 0)):
        raise ValueError(f"micro_bsz is {samples}; give finite samples >= 0")
    return samples


def most_samples(fixed: Floats, per_sample: Floats, memory_limit: float) -> Floats:
    """Return the most whole samples that fit the fullest device; devices are the first axis."""
    room = memory_limit - fixed
    positive = per_sample > 0
    samples = np.where(positive, room / np.where(positive, per_sample, 1.0), np.inf)
    samples = np.where(room >= 0, np.maximum(samples, 0.0), 0.0)
    # 15.999999999999998 samples are 16.
    return np.asarray(np.floor(samples.min(axis=0) * (1 + _ROUNDING)))


def _stage_bytes(
    profile: LayerProfile,
    balance: Sequence[int],
    num_microbatches: Floats,
    checkpoint: Checkpoints,
    schedule: ScheduleKind,
) -> tuple[Floats, Floats]:
    """Return bytes independent of b, shape (K, 1, …), and bytes per sample, shape (K, *M's)."""
    check_balance(balance, profile.num_layers)
    if not np.all(np.isfinite(num_microbatches) & (num_microbatches >= 1)):
        raise ValueError(f"num_microbatches is {num_microbatches}; give a finite number >= 1")
    column = (-1,) + (1,) * num_microbatches.ndim
    starts = [start for start, _ in stage_ranges(balance)]
    fixed = held_state(profile, balance, len(balance))
    sizes = (
        profile.boundary_bytes()[starts].reshape(column),
        profile.by_stage("activation_bytes", balance).reshape(column),
        num_microbatches,
        np.arange(len(balance), 0, -1).reshape(column),
    )
    modes = stage_modes(checkpoint, len(balance))
    by_mode = {mode: kept_bytes(*sizes, mode, schedule) for mode in set(modes)}
    per_sample = np.stack([by_mode[mode][stage] for stage, mode in enumerate(modes)])
    return fixed.reshape(column), per_sample
