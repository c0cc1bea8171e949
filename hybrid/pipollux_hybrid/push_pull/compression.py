"""Compression of pushed changes to one byte per element (as arXiv 2401.09135)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LEVELS = 127
"""Largest magnitude of a byte."""


class Quantized(NamedTuple):
    """A tensor as bytes times a scale."""

    values: Tensor
    """int8, of the tensor's shape."""
    scale: float
    """Value of one level: the largest magnitude / 127."""

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Return the approximated tensor."""
        return self.values.to(dtype).mul_(self.scale)


def quantize(tensor: Tensor) -> Quantized:
    """Round a tensor to 255 levels; no element's error is above half a level, max|x|/254.

    A tensor with an element that is not finite has the scale NaN, so that it stays visible.
    """
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    scale = largest / LEVELS
    if scale == 0.0 or scale != scale or scale == float("inf"):
        # Also where the quotient underflows: all of it becomes the error of the push.
        broken = scale != 0.0
        return Quantized(
            torch.zeros_like(tensor, dtype=torch.int8), float("nan") if broken else 0.0
        )
    # The largest numbers of a dtype would be decoded to infinity by rounding.
    limits = torch.finfo(tensor.dtype)
    scale = min(scale, limits.max / LEVELS * (1 - limits.eps))
    levels = (tensor / scale).round_().clamp_(-LEVELS, LEVELS)
    return Quantized(levels.to(torch.int8), scale)


class ErrorFeedback:
    """Adds what compression has left out of a push to the next one of the same parameter."""

    def __init__(self) -> None:
        self.errors: dict[str, Tensor] = {}
        """By parameter name; state of the replica."""

    def compress(self, name: str, change: Tensor) -> Quantized:
        """Return the compressed change, and keep its error."""
        kept = self.errors.get(name)
        wanted = change if kept is None else change + kept
        quantized = quantize(wanted)
        if quantized.scale == quantized.scale:
            self.errors[name] = wanted - quantized.decoded(wanted.dtype)
        return quantized
