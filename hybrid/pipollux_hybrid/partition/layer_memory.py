"""Memory of a layer on its device: kept by autograd, and by an optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["SavedBytes", "kept_bytes", "optimizer_bytes"]

ASSUMED_RATE = 2.0
"""Bytes of optimizer state per byte of a parameter, if it cannot be measured: Adam's."""
PROBE = 64


class SavedBytes:
    """Counts the bytes that autograd keeps of one forward, each storage once.

    The layer's parameters and buffers are not activations. A tensor that the previous layer keeps
    already (such as the output of an activation function) counts for that layer only. Without a
    layer nothing is counted.
    """

    def __init__(self, layer: nn.Module | None = None, before: SavedBytes | None = None) -> None:
        state = () if layer is None else (*layer.parameters(), *layer.buffers())
        self._left_out = {_address(x) for x in state}
        self._before = before
        # Kept alive, so that no address is reused.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._kept: set[int] = set()
        self.total = 0

    def note_inputs(self, given: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        """Record the layer's inputs, and the copies of them that it runs on."""
        kept = self._before._kept if self._before is not None else set()
        for tensor, copied in zip(given, copies, strict=True):
            if _address(tensor) in kept:
                self._left_out.add(_address(copied))
        # Addresses of the inputs are compared with the previous layer's, which are alive.
        if self._before is not None:
            self._before._storages.clear()
        self._before = None

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context for the forward."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def note_stashed(self, tensors: Iterable[Tensor]) -> None:
        """Add tensors of skip connections, which are kept until their pop."""
        for tensor in tensors:
            self._add(tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._add(tensor)
        # Detached: a reference cycle of tensor and graph node would never be freed.
        return tensor.detach()

    def _add(self, tensor: Tensor) -> None:
        address = _address(tensor)
        if address in self._left_out or address in self._storages:
            return
        storage = tensor.untyped_storage()
        self._storages[address] = storage
        self._kept.add(address)
        self.total += storage.nbytes()


def kept_bytes(tensors: Iterable[Tensor]) -> float:
    """Return the bytes of the elements of tensors."""
    return float(sum(tensor.nbytes for tensor in tensors))


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, float]:
    """Return the bytes of optimizer state per byte of a parameter, by parameter: measured with a
    step of a copy of the optimizer on a small tensor; if it cannot be copied, Adam's rate.
    """
    rates = {}
    for group in optimizer.param_groups:
        for dtype in {parameter.dtype for parameter in group["params"]}:
            rate = _rate(optimizer, group, dtype)
            rates.update({p: rate for p in group["params"] if p.dtype == dtype})
    return rates


def _rate(optimizer: torch.optim.Optimizer, group: dict[str, Any], dtype: torch.dtype) -> float:
    # Options that need a GPU or a compiler do not change the size of the state.
    unusable = {"params", "fused", "foreach", "capturable", "initial_lr"}
    known = inspect.signature(type(optimizer)).parameters
    options = {k: v for k, v in group.items() if k in known and k not in unusable}
    probe = nn.Parameter(torch.zeros(PROBE, dtype=dtype))
    probe.grad = torch.ones_like(probe)
    try:
        tried = type(optimizer)([probe], **options)
        tried.step()
    except Exception:  # any error of a user's optimizer: only an estimate is needed
        return ASSUMED_RATE
    tensors = [x for x in tried.state[probe].values() if isinstance(x, Tensor) and x.dim() > 0]
    return sum(x.nbytes for x in tensors) / probe.nbytes


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())
