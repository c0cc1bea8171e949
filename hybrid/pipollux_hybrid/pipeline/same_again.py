"""Rejecting layers that compute something else when they are recomputed.

A layer may draw from a generator of its own, or count its calls in an attribute. What is recomputed
is then not what the loss was computed from, and the gradients are of neither. So the outputs of the
first recomputations of a stage are compared with what they were at first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipollux_hybrid.errors import ConfigurationError

from .stage import Stage

__all__ = ["OTHERWISE", "SUMMED", "Kept", "SameAgain", "agree", "tolerance_of"]

CHECKED_FORWARDS = 64
"""Forwards, from the first one of a stage on, whose recomputations are compared."""
CHECK_INTERVAL = 1000
"""Every so many forwards after these one is."""
TOLERANCES = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 3e-3}
"""How far two ways to compute the same may be apart, relative to the largest number."""
SUMMED = (*TOLERANCES, torch.complex64, torch.float16, torch.bfloat16)
"""Types of numbers that can be added up on any device."""
COARSE_TOLERANCE = 3e-2
"""The same in 16 bits, and under autocast."""
OTHERWISE = (
    "computed something else when recomputed than at first, so its gradients would be wrong: a "
    "layer draws from a generator of its own, or depends on an attribute that forwards change; "
    "have it draw from torch's own generators, set the attribute in the script, or say "
    "activation_checkpoint='never'"
)


class Kept(NamedTuple):
    """An output, and whether it and the parameters are as they were."""

    tensor: Tensor
    version: int
    weights: tuple[int, float]


class SameAgain:
    """The outputs of a stage's first forwards, until they are recomputed.

    Args:
        stage: The layers.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._forwards = 0

    @property
    def is_on(self) -> bool:
        """Whether the recomputation of the coming forward will be compared."""
        return self._forwards < CHECKED_FORWARDS or self._forwards % CHECK_INTERVAL == 0

    def keep(self, outputs: Sequence[Tensor]) -> list[Kept]:
        """Return what a recomputation of these outputs will be compared with."""
        is_on = self.is_on
        self._forwards += 1
        if not is_on:
            return []
        plain = [x.detach() for x in outputs if not x.is_inference()]
        weights = self._changes()
        return [Kept(x, x._version, weights) for x in plain]

    def compare(self, kept: Sequence[Kept], again: Sequence[Tensor]) -> None:
        """Compare a recomputation.

        Raises:
            ConfigurationError: It differs.
        """
        if not kept or kept[0].weights != self._changes():
            return  # something has changed the parameters since, which is told elsewhere
        for (first, version, _), tensor in zip(kept, again, strict=True):
            if first._version == version and not _alike(first, tensor.detach()):
                raise ConfigurationError(f"stage {self._stage.index} {OTHERWISE}")

    def _changes(self) -> tuple[int, float]:
        """Return what tells whether the parameters were changed.

        That is how often it was done in place, and their sum, as ``x.data`` does it uncounted.
        """
        parameters = [x for x in self._stage.parameters() if not x.is_inference()]
        sums = [x.detach().abs().sum().double() for x in parameters if x.dtype in SUMMED]
        total = float(torch.stack(sums).sum()) if sums else 0.0
        return sum(x._version for x in parameters), total


def tolerance_of(tensor: Tensor) -> float:
    """Return how far two ways to compute a tensor may be apart, relative to its largest number."""
    if torch.is_autocast_enabled(tensor.device.type):
        return COARSE_TOLERANCE
    return TOLERANCES.get(tensor.dtype, COARSE_TOLERANCE)


def agree(first: Sequence[Tensor], again: Sequence[Tensor]) -> bool:
    """Return whether two outputs are the same but for rounding."""
    pairs = zip(first, again, strict=False)
    return len(first) == len(again) and all(_alike(x.detach(), y.detach()) for x, y in pairs)


def _alike(first: Tensor, again: Tensor) -> bool:
    if first.shape != again.shape or first.dtype != again.dtype:
        return False
    if first.numel() == 0 or first.layout is not torch.strided:
        return True
    if not (first.is_floating_point() or first.is_complex()):
        return torch.equal(first, again)
    if not first.isfinite().all():
        return True
    return bool((first - again).abs().max() <= tolerance_of(first) * first.abs().max())
