"""Bytes that each stage's device holds, and the largest micro-batch that fits.

A stage holds its parameters, as many bytes of gradients, the optimizer's state, and the activations
of the micro-batches that are in flight: those whose forward is done and whose backward is not. With
M micro-batches, K stages, and stage k counted from 0:

    GPipe   all forwards come before all backwards:              c = M
    1F1B    a stage goes back as soon as it can:                 c = min(M, K - k)

Where replicas divide the optimizer's state (`LayerProfile.optimizer_shards`), it is the most that
one of them may hold (`largest_share`), a layer's state counting as one parameter's.

A = bytes per sample that autograd keeps for the stage, I = those of its input. Kept per sample:

    never          c·A
    always         c·I + A                        inputs, and the one that is recomputed
    except_last    GPipe  (M - 1)·I + A           the last micro-batch has gone back, and freed its
                                                  activations, before the first is recomputed
                   1F1B   (c - 1)·I + A + max(A, I) for c > 1: the last micro-batch goes back last,
                          so it and a recomputed one are there at once; I + A for c = 1
                   A for M = 1, as nothing is recomputed

GPipe here is torchgpipe's order, last micro-batch back first. torch's own, with a process per
stage, takes the last one back last, so under except_last it is there when others are recomputed,
and the stage needs A more. 1F1B is PipeDream-Flush's (Narayanan et al., ICML'21). Left out: what a
kernel needs while it runs, boundary buffers in flight, and what the allocator loses to fragments.
Leave the limit some margin for them.

Interleaved 1F1B has several stages on a device, which have their most at different times, and so
no such table: `interleaved_memory` follows what each device does. Without recomputation and with
equal stages the first device holds the activations of K·V + K - 1 micro-batches in one stage, as
much as 1 + (K - 1)/(K·V) times 1F1B's (Korthikanti et al., MLSys'23).

Arguments broadcast, so that one call answers for many candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pipollux_perfmodel.timing.device_order import Work, device_order
from pipollux_perfmodel.timing.params import CHECKPOINTS, CUT_SCHEDULES, Checkpoint, ScheduleKind

from .layer_profile import Floats, LayerProfile, check_balance, stage_ranges

_ROUNDING = 1e-12


def stage_memory(
    profile: LayerProfile,
    balance: Sequence[int],
    micro_bsz: ArrayLike,
    num_microbatches: ArrayLike,
    *,
    checkpoint: Checkpoint = "never",
    schedule: ScheduleKind = "gpipe",
) -> Floats:
    """Return the most bytes that each stage holds at once.

    Args:
        profile: the costs of the layers.
        balance: number of layers of each stage, K entries.
        micro_bsz: b, samples per micro-batch; any shape.
        num_microbatches: M; any shape that broadcasts with `micro_bsz`.
        checkpoint: which micro-batches are recomputed.
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
    check_choices(checkpoint, schedule)
    samples, count = np.broadcast_arrays(
        np.asarray(micro_bsz, float), np.asarray(num_microbatches, float)
    )
    _checked_samples(samples)
    fixed, per_sample = _stage_bytes(profile, balance, count, checkpoint, schedule)
    return np.asarray(fixed + per_sample * samples)


def interleaved_memory(
    profile: LayerProfile,
    balance: Sequence[int],
    num_devices: int,
    micro_bsz: ArrayLike,
    num_microbatches: int,
    *,
    checkpoint: Checkpoint = "never",
) -> Floats:
    """Return the most bytes that each device holds at once with interleaved 1F1B.

    Args:
        profile: the costs of the layers.
        balance: number of layers of each stage, K·V entries; stage q is on device q mod K.
        num_devices: K.
        micro_bsz: b, samples per micro-batch; any shape.
        num_microbatches: M.
        checkpoint: which micro-batches are recomputed.

    Returns:
        Bytes, shape (K, *shape of b).

    Raises:
        ValueError: when the balance does not fit the profile or the devices, b is negative or not
            finite, or the checkpoint mode is unknown.

    Example:
        >>> from pipollux_perfmodel.partitioning.layer_profile import Layer
        >>> profile = LayerProfile((Layer(0, 1, 0, 2, activation_bytes=1),) * 8)
        >>> interleaved_memory(profile, [2] * 4, 2, 1.0, 8).tolist()
        [10.0, 6.0]
        >>> stage_memory(profile, [4] * 2, 1.0, 8, schedule="1f1b").tolist()
        [8.0, 4.0]
    """
    samples = _checked_samples(np.asarray(micro_bsz, float))
    state, per_sample = _device_bytes(profile, balance, num_devices, num_microbatches, checkpoint)
    column = (-1,) + (1,) * samples.ndim
    return np.asarray(state.reshape(column) + per_sample.reshape(column) * samples)


def largest_interleaved_micro_bsz(
    profile: LayerProfile,
    balance: Sequence[int],
    num_devices: int,
    memory_limit: float,
    num_microbatches: ArrayLike,
    *,
    checkpoint: Checkpoint = "never",
) -> Floats:
    """Return the most whole samples per micro-batch that fit every device, interleaved.

    As `largest_micro_bsz`, with the devices of `interleaved_memory`.

    Example:
        >>> from pipollux_perfmodel.partitioning.layer_profile import Layer
        >>> profile = LayerProfile((Layer(0, 1, 0, 2, activation_bytes=1),) * 8)
        >>> largest_interleaved_micro_bsz(profile, [2] * 4, 2, 25.0, 8).tolist()
        2.0
    """
    check_limit(memory_limit)
    counts = np.asarray(num_microbatches)
    most = [
        _most_samples(
            *_device_bytes(profile, balance, num_devices, int(count), checkpoint), memory_limit
        )
        for count in counts.ravel()
    ]
    return np.reshape(np.array(most), counts.shape)


def largest_micro_bsz(
    profile: LayerProfile,
    balance: Sequence[int],
    memory_limit: float,
    num_microbatches: ArrayLike,
    *,
    checkpoint: Checkpoint = "never",
    schedule: ScheduleKind = "gpipe",
) -> Floats:
    """Return the most whole samples per micro-batch that fit every stage.

    Args:
        profile: the costs of the layers.
        balance: number of layers of each stage, K entries.
        memory_limit: bytes of each stage's device.
        num_microbatches: M; any shape.
        checkpoint: which micro-batches are recomputed.
        schedule: "gpipe" or "1f1b".

    Returns:
        Floats of the shape of M: 0 where no sample fits, infinity where samples take no memory.

    Raises:
        ValueError: as `stage_memory`, or when the limit is not above 0.

    Example:
        >>> from pipollux_perfmodel.partitioning.layer_profile import Layer
        >>> layer = Layer(0, 1, 0, 2, parameter_bytes=10, activation_bytes=3)
        >>> largest_micro_bsz(LayerProfile((layer, layer)), [1, 1], 50.0, [1, 2]).tolist()
        [10.0, 5.0]
    """
    check_choices(checkpoint, schedule)
    check_limit(memory_limit)
    count = np.asarray(num_microbatches, float)
    fixed, per_sample = _stage_bytes(profile, balance, count, checkpoint, schedule)
    return _most_samples(fixed, per_sample, memory_limit)


def kept_bytes(
    input_bytes: Any,
    activation_bytes: Any,
    num_microbatches: Any,
    stages_left: Any,
    checkpoint: Checkpoint,
    schedule: ScheduleKind,
) -> Floats:
    """Return bytes per sample that a stage keeps at once, by the table above; all broadcast.

    Args:
        input_bytes: I, bytes per sample of the stage's input.
        activation_bytes: A, bytes per sample that autograd keeps for the stage's backward.
        num_microbatches: M.
        stages_left: K - k, the stage and those after it.
        checkpoint: which micro-batches are recomputed.
        schedule: "gpipe" or "1f1b".
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


def largest_share(whole: Any, largest: Any, num_shards: int) -> Floats:
    """Return the most that one replica may hold of an optimizer's state divided among several.

    Parameters are given out whole, the largest first, each to the replica that has least by then.
    Whoever has most in the end had no more than the average of the others' when the last one came,
    so it has no more than S/R + (1 - 1/R)·p (Graham, 1969): of all of S, and the largest p.

    Args:
        whole: S, bytes of all of it.
        largest: p, bytes of the largest parameter's, or more.
        num_shards: R.

    Example:
        >>> float(largest_share(100.0, 10.0, 4))
        32.5
    """
    share = np.asarray(whole) / num_shards + (1 - 1 / num_shards) * np.asarray(largest)
    return np.asarray(np.minimum(whole, share))


def range_state_bytes(profile: LayerProfile) -> Floats:
    """Return bytes of parameters, gradients and optimizer state of layers i to j - 1, (L+1, L+1).

    Of a state that is divided, the most that a replica may hold; what is below the diagonal means
    nothing.
    """
    optimizer = profile.column("optimizer_bytes")
    plain, whole = (
        (sums := np.concatenate(([0.0], np.cumsum(each)))) - sums[:, None]
        for each in (2 * profile.column("parameter_bytes"), optimizer)
    )
    if profile.optimizer_shards == 1:
        return np.asarray(plain + whole)
    largest = np.zeros_like(whole)
    for start in range(profile.num_layers):
        largest[start, start + 1 :] = np.maximum.accumulate(optimizer[start:])
    return np.asarray(plain + largest_share(whole, largest, profile.optimizer_shards))


def _stage_state(profile: LayerProfile, balance: Sequence[int], num_devices: int) -> Floats:
    """Return the same of each device, shape (num_devices,)."""
    starts = [start for start, _ in stage_ranges(balance)]
    optimizer, parameters = profile.column("optimizer_bytes"), profile.column("parameter_bytes")
    plain, whole = (
        np.add.reduceat(each, starts).reshape(-1, num_devices).sum(0)
        for each in (2 * parameters, optimizer)
    )
    largest = np.maximum.reduceat(optimizer, starts).reshape(-1, num_devices).max(0)
    return np.asarray(plain + largest_share(whole, largest, profile.optimizer_shards))


def check_choices(checkpoint: str, schedule: str) -> None:
    """Refuse unknown checkpoint modes and schedules.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    if checkpoint not in CHECKPOINTS:
        raise ValueError(f"checkpoint is {checkpoint!r}; give one of {CHECKPOINTS}")
    if schedule not in CUT_SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; give one of {CUT_SCHEDULES}")


def check_limit(memory_limit: float) -> None:
    """Refuse a memory limit that is not a finite number of bytes above 0.

    Raises:
        ValueError: naming the value.
    """
    if not (math.isfinite(memory_limit) and memory_limit > 0):
        raise ValueError(f"memory_limit is {memory_limit}; give finite bytes > 0, or None")


def _checked_samples(samples: Floats) -> Floats:
    if not np.all(np.isfinite(samples) & (samples >= 0)):
        raise ValueError(f"micro_bsz is {samples}; give finite samples >= 0")
    return samples


def _most_samples(fixed: Floats, per_sample: Floats, memory_limit: float) -> Floats:
    """Return the most whole samples that fit the fullest device; devices are the first index."""
    room = memory_limit - fixed
    positive = per_sample > 0
    samples = np.where(positive, room / np.where(positive, per_sample, 1.0), np.inf)
    samples = np.where(room >= 0, np.maximum(samples, 0.0), 0.0)
    # 15.999999999999998 samples are 16.
    return np.asarray(np.floor(samples.min(axis=0) * (1 + _ROUNDING)))


def _device_bytes(
    profile: LayerProfile,
    balance: Sequence[int],
    num_devices: int,
    num_microbatches: int,
    checkpoint: Checkpoint,
) -> tuple[Floats, Floats]:
    """Return interleaved devices' bytes whatever b is, and their bytes per sample, shape (K,)."""
    check_choices(checkpoint, "1f1b")
    check_balance(balance, profile.num_layers)
    if num_devices < 1 or len(balance) % num_devices:
        raise ValueError(
            f"num_devices is {num_devices}; give a number that divides the {len(balance)} stages"
        )
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches is {num_microbatches}; give at least one")
    starts = [start for start, _ in stage_ranges(balance)]
    inputs = profile.boundary_bytes()[starts].tolist()
    activations = profile.by_stage("activation_bytes", balance).tolist()
    recomputed = 0 if checkpoint == "never" else num_microbatches - (checkpoint == "except_last")
    kept = [
        _most_kept(
            device_order("interleaved", device, num_devices, len(balance), num_microbatches),
            inputs,
            activations,
            recomputed,
        )
        for device in range(num_devices)
    ]
    return _stage_state(profile, balance, num_devices), np.array(kept)


def _most_kept(
    order: Sequence[Work],
    inputs: Sequence[float],
    activations: Sequence[float],
    num_recomputed: int,
) -> float:
    """Return the most bytes per sample that are kept at once, of the first so many only inputs."""
    kept = most = 0.0
    for phase, stage, microbatch in order:
        again = microbatch < num_recomputed
        share = inputs[stage] if again else activations[stage]
        kept += share if phase == "forward" else 0.0
        most = max(most, kept + (activations[stage] if again and phase == "backward" else 0.0))
        kept -= share if phase == "backward" else 0.0
    return most


def _stage_bytes(
    profile: LayerProfile,
    balance: Sequence[int],
    num_microbatches: Floats,
    checkpoint: Checkpoint,
    schedule: ScheduleKind,
) -> tuple[Floats, Floats]:
    """Return bytes whatever b is, shape (K, 1, …), and bytes per sample, shape (K, *M's)."""
    check_balance(balance, profile.num_layers)
    if not np.all(np.isfinite(num_microbatches) & (num_microbatches >= 1)):
        raise ValueError(f"num_microbatches is {num_microbatches}; give a finite number >= 1")
    column = (-1,) + (1,) * num_microbatches.ndim
    starts = [start for start, _ in stage_ranges(balance)]
    fixed = _stage_state(profile, balance, len(balance))
    per_sample = kept_bytes(
        profile.boundary_bytes()[starts].reshape(column),
        profile.by_stage("activation_bytes", balance).reshape(column),
        num_microbatches,
        np.arange(len(balance), 0, -1).reshape(column),
        checkpoint,
        schedule,
    )
    return fixed.reshape(column), per_sample
