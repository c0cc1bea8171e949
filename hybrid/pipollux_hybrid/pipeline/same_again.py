"""Rejects layers whose recomputation gives another output.

A layer may draw from its own generator, or count its calls in an attribute. The loss then comes
from one forward and the gradients from another. So the first recomputations of a stage are compared
with the first forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipollux_hybrid.errors import ConfigurationError

from .stage import Stage

CHECKED_FORWARDS = 64
"""First forwards of a stage, whose recomputations are compared."""
CHECK_INTERVAL = 1000
"""Interval of later comparisons, in forwards."""
TOLERANCES = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 3e-3}
"""Tolerance between two computations of the same values, relative to the largest number."""
SUMMED = (*TOLERANCES, torch.complex64, torch.float16, torch.bfloat16)
"""Types of numbers that can be summed on any device."""
COARSE_TOLERANCE = 3e-2
"""Tolerance in 16 bits, and under autocast."""
OTHERWISE = (
    "computed something else when recomputed than at first, so its gradients would be wrong: a "
    "layer draws from a generator of its own, or depends on an attribute that forwards change; "
    "have it draw from torch's own generators, set the attribute in the script, or say "
    "activation_checkpoint='never'"
)


class Kept(NamedTuple):
    """An output, with the versions of it and of the parameters."""

    tensor: Tensor
    version: int
    weights: tuple[int, float]


class SameAgain:
    """The outputs of a stage's first forwards, until they are recomputed."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._layers = [*stage.modules()]
        self._forwards = 0

    @property
    def is_on(self) -> bool:
        """Whether the recomputation of the next forward will be compared."""
        return self._forwards < CHECKED_FORWARDS or self._forwards % CHECK_INTERVAL == 0

    def keep(self, outputs: Sequence[Tensor]) -> list[Kept]:
        """Return these outputs in the form that :meth:`compare` takes."""
        is_on = self.is_on
        self._forwards += 1
        if not is_on:
            return []
        plain = [x.detach() for x in outputs if not x.is_inference()]
        weights = self._changes()
        return [Kept(x, x._version, weights) for x in plain]

    def compare(self, kept: Sequence[Kept], again: Sequence[Tensor]) -> None:
        """Raise a ConfigurationError if a recomputation differs."""
        if not kept or kept[0].weights != self._changes():
            return  # the parameters have changed since, which other checks report
        for (first, version, _), tensor in zip(kept, again, strict=True):
            if first._version == version and not _alike(first, tensor.detach()):
                raise ConfigurationError(f"stage {self._stage.index} {OTHERWISE}")

    def _changes(self) -> tuple[int, float]:
        """Return the number of changes of the parameters in place, and the sum of their absolute
        values, as PyTorch does not count changes of ``x.data``.
        """
        held = [x for layer in self._layers for x in layer._parameters.values() if x is not None]
        parameters: list[Tensor] = [x for x in held if not x.is_inference()]
        summed = [x for x in parameters if x.dtype in SUMMED and x.layout is torch.strided]
        with torch.no_grad():
            sums = torch._foreach_norm(summed, 1.0) if summed else ()
            total = float(torch.stack(sums).sum(dtype=torch.float64)) if sums else 0.0
        return sum([x._version for x in parameters]), total


def tolerance_of(tensor: Tensor) -> float:
    """Return the tolerance of a tensor's values, relative to its largest number."""
    if torch.is_autocast_enabled(tensor.device.type):
        return COARSE_TOLERANCE
    return TOLERANCES.get(tensor.dtype, COARSE_TOLERANCE)


def agree(first: Sequence[Tensor], again: Sequence[Tensor]) -> bool:
    """Return whether two outputs are equal up to rounding."""
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
