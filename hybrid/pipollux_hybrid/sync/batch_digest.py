"""Digests of batches, by which processes find out whether they were given the same samples.

The first batches of a run are read as a whole. After that a few elements of each tensor are read in
every call; of tensors on a GPU, which the host would have to wait for, only now and then.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .replica_check import tensor_digest

__all__ = ["BatchDigests", "digest_of"]

WHOLE = 8
"""Calls, the first of a run, whose batches are read as a whole."""
ELEMENTS = 16
"""Elements of each tensor that are read in the other calls."""
GPU_EVERY = 64
"""Calls between two in which such elements are read from a GPU."""


class BatchDigests:
    """The digests of successive calls; processes with the same calls read the same of each."""

    def __init__(self) -> None:
        self._calls = -1

    def begin(self) -> None:
        """Begin a call."""
        self._calls += 1

    def digest(self, batch: Any) -> int:
        """Return the digest of a PyTree, with 32 bits; 0 if it was not read.

        Args:
            batch: Of tensors; other leaves are passed over.
        """
        whole = self._calls < WHOLE
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        if not (whole or on_cpu or self._calls % GPU_EVERY == 0):
            return 0
        return digest_of(tensors, whole=whole)


def digest_of(tensors: list[Tensor], *, whole: bool) -> int:
    """Return a number in [1, 2**32] that tells tensors from others.

    Args:
        tensors: On any devices.
        whole: Whether to read all elements, or a few that lie apart.
    """
    digest = 0
    for tensor in tensors:
        values = tensor.detach()
        if values.layout is not torch.strided or values.is_nested or values.is_quantized:
            digest = zlib.crc32(f"{tensor.dtype} {tensor.layout}".encode(), digest)
            continue
        if not whole:
            digest = zlib.crc32(f"{tuple(tensor.shape)}".encode(), digest)
            values = _some(values)
        digest = zlib.crc32(tensor_digest("", values), digest)
    return digest + 1


def _some(tensor: Tensor) -> Tensor:
    """Return some elements that lie apart, as one dimension."""
    if not tensor.is_contiguous():
        while tensor.dim() > 1:
            tensor = tensor[len(tensor) // 2] if len(tensor) else tensor.reshape(-1)
    flat = tensor.reshape(-1)
    return flat[:: max(flat.numel() // ELEMENTS, 1)]
