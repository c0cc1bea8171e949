"""Digests of batches, by which processes detect that they were given the same samples.

The first batches of a run are read whole. Later calls read a few elements of each tensor; on a GPU,
where reading blocks the host, only at intervals.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipollux_hybrid.pipeline.unloaded import is_loaded

from .replica_check import tensor_digest

WHOLE = 8
"""First calls of a run, which read whole batches."""
ELEMENTS = 16
"""Elements of each tensor that the other calls read."""
GPU_EVERY = 64
"""Calls between two reads from a GPU."""


class BatchDigests:
    """Digests of successive calls; processes with the same calls read the same elements."""

    def __init__(self) -> None:
        self._calls = -1

    def begin(self) -> None:
        """Begin a call."""
        self._calls += 1

    def digest(self, batch: Any) -> int:
        """Return a 32-bit digest of the tensors of a PyTree; 0 if it was not read or loaded."""
        if not is_loaded(batch):
            return 0
        whole = self._calls < WHOLE
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        if not (whole or on_cpu or self._calls % GPU_EVERY == 0):
            return 0
        return digest_of(tensors, whole=whole)


def digest_of(tensors: list[Tensor], *, whole: bool) -> int:
    """Return a digest in [1, 2**32]; unless ``whole``, of a few elements that lie apart."""
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
    """Return some elements that lie apart, in one dimension."""
    if not tensor.is_contiguous():
        while tensor.dim() > 1:
            tensor = tensor[len(tensor) // 2] if len(tensor) else tensor.reshape(-1)
    flat = tensor.reshape(-1)
    return flat[:: max(flat.numel() // ELEMENTS, 1)]
