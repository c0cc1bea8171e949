"""Memory of a layer on its device: what autograd keeps, and what an optimizer will."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["SavedBytes", "kept_bytes", "optimizer_bytes"]

ASSUMED_RATE = 2.0
"""Bytes kept for each byte of a parameter by an optimizer that cannot be tried: Adam's."""
PROBE = 64


class SavedBytes:
    """Counts what autograd keeps of one forward for the backward, each storage once.

    Parameters and buffers are no activations. A tensor that the layer before keeps already (an
    activation function its output, say) is counted with that layer, and not with the one that takes
    it.

    Args:
        layer: Whose parameters and buffers do not count; None counts nothing.
        before: What the layer before kept.
    """

    def __init__(self, layer: nn.Module | None = None, before: SavedBytes | None = None) -> None:
        state = () if layer is None else (*layer.parameters(), *layer.buffers())
        self._left_out = {_address(x) for x in state}
        self._before = before
        # Kept alive, so that no address is used twice.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._kept: set[int] = set()
        self.total = 0
        """Bytes."""

    def note_inputs(self, given: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        """Note the layer's inputs, and the copies of them that it runs on."""
        kept = self._before._kept if self._before is not None else set()
        for tensor, copied in zip(given, copies, strict=True):
            if _address(tensor) in kept:
                self._left_out.add(_address(copied))
        # Only the inputs' addresses are compared with those of the layer before, and these live.
        if self._before is not None:
            self._before._storages.clear()
        self._before = None

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context in which the forward is to run."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def note_stashed(self, tensors: Iterable[Tensor]) -> None:
        """Add what waits in a skip connection, which is kept for the layer that needs it."""
        for tensor in tensors:
            self._add(tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._add(tensor)
        # Without its graph: a tensor that holds the node that holds it would never be freed.
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
    """Return the bytes that the optimizer keeps for each byte of a parameter, by parameter.

    Found by a step of such an optimizer over a small tensor; where it cannot be made again, Adam's
    two are assumed.
    """
    rates = {}
    for group in optimizer.param_groups:
        for dtype in {parameter.dtype for parameter in group["params"]}:
            rate = _rate(optimizer, group, dtype)
            rates.update({p: rate for p in group["params"] if p.dtype == dtype})
    return rates


def _rate(optimizer: torch.optim.Optimizer, group: dict[str, Any], dtype: torch.dtype) -> float:
    # Options that need a GPU or a compiler do not change what is kept.
    unusable = {"params", "fused", "foreach", "capturable", "initial_lr"}
    known = inspect.signature(type(optimizer)).parameters
    options = {k: v for k, v in group.items() if k in known and k not in unusable}
    probe = nn.Parameter(torch.zeros(PROBE, dtype=dtype))
    probe.grad = torch.ones_like(probe)
    try:
        tried = type(optimizer)([probe], **options)
        tried.step()
    except Exception:  # whatever a user's optimizer raises; it is asked for an estimate only
        return ASSUMED_RATE
    tensors = [x for x in tried.state[probe].values() if isinstance(x, Tensor) and x.dim() > 0]
    return sum(x.nbytes for x in tensors) / probe.nbytes


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())
