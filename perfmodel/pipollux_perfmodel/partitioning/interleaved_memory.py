"""Memory of each device with interleaved chunks of layers.

The stages of a device reach their maxima at different times, so there is no closed form as in
`memory`: the order of work of each device is simulated. Without recomputation and with equal stages
the first device holds the activations of K·V + K - 1 micro-batches of one stage, 1 + (K - 1)/(K·V)
times as much as 1F1B (Korthikanti et al., MLSys'23).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from pipollux_perfmodel.timing.device_order import Work, device_order
from pipollux_perfmodel.timing.params import Checkpoints, stage_modes

from .layer_profile import Floats, LayerProfile, check_balance, stage_ranges
from .memory import check_limit, checked_samples, held_state, most_samples


def interleaved_memory(
    profile: LayerProfile,
    balance: Sequence[int],
    num_devices: int,
    micro_bsz: ArrayLike,
    num_microbatches: int,
    *,
    checkpoint: Checkpoints = "never",
) -> Floats:
    """Return the maximum bytes of each device with interleaved 1F1B.

    Args:
        profile: the costs of the layers.
        balance: number of layers of each stage, K·V entries; stage q is on device q mod K.
        num_devices: K.
        micro_bsz: b, samples per micro-batch; any shape.
        num_microbatches: M.
        checkpoint: the recomputed micro-batches, for all stages or per stage.

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
        >>> from pipollux_perfmodel.partitioning.memory import stage_memory
        >>> stage_memory(profile, [4] * 2, 1.0, 8, schedule="1f1b").tolist()
        [8.0, 4.0]
    """
    samples = checked_samples(np.asarray(micro_bsz, float))
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
    checkpoint: Checkpoints = "never",
) -> Floats:
    """As `largest_micro_bsz`, with the devices of `interleaved_memory`.

    >>> from pipollux_perfmodel.partitioning.layer_profile import Layer
    >>> profile = LayerProfile((Layer(0, 1, 0, 2, activation_bytes=1),) * 8)
    >>> largest_interleaved_micro_bsz(profile, [2] * 4, 2, 25.0, 8).tolist()
    2.0
    """
    check_limit(memory_limit)
    counts = np.asarray(num_microbatches)
    most = [
        most_samples(
            *_device_bytes(profile, balance, num_devices, int(count), checkpoint), memory_limit
        )
        for count in counts.ravel()
    ]
    return np.reshape(np.array(most), counts.shape)


def _device_bytes(
    profile: LayerProfile,
    balance: Sequence[int],
    num_devices: int,
    num_microbatches: int,
    checkpoint: Checkpoints,
) -> tuple[Floats, Floats]:
    """Return bytes independent of b, and bytes per sample, of each device, shape (K,)."""
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
    kept = [
        _most_kept(
            device_order("interleaved", device, num_devices, len(balance), num_microbatches),
            inputs,
            activations,
            0 if mode == "never" else num_microbatches - (mode == "except_last"),
        )
        for device, mode in enumerate(stage_modes(checkpoint, num_devices))
    ]
    return held_state(profile, balance, num_devices), np.array(kept)


def _most_kept(
    order: Sequence[Work],
    inputs: Sequence[float],
    activations: Sequence[float],
    num_recomputed: int,
) -> float:
    """Return the maximum bytes per sample; the first `num_recomputed` keep only their inputs."""
    kept = most = 0.0
    for phase, stage, microbatch in order:
        again = microbatch < num_recomputed
        share = inputs[stage] if again else activations[stage]
        kept += share if phase == "forward" else 0.0
        most = max(most, kept + (activations[stage] if again and phase == "backward" else 0.0))
        kept -= share if phase == "backward" else 0.0
    return most
