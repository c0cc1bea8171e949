"""Rejects inputs whose dimension 0 is the sequence.

PyTorch's recurrent layers and attention take [sequence, batch, …] without ``batch_first=True``. A
pipeline would cut every sequence along dimension 0 and train another model. Layers may transpose
their input, so the argument alone decides nothing. So stages with such layers compute the first two
micro-batches again, separately and together, which must give the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torchgpipe.checkpoint import enable_recomputing, is_recomputing

from pipollux_hybrid.errors import ConfigurationError

from .buffer_values import BufferValues
from .microbatch import PyTree
from .same_again import tolerance_of
from .stage import Stage

__all__ = ["MixingCheck"]


class MixingCheck:
    """Compares the first two micro-batches of a stage, if it has layers that may mix them."""

    def __init__(self, stage: Stage, buffers: BufferValues) -> None:
        self._stage, self._buffers = stage, buffers
        self._names = [
            f"{name!r} ({type(layer).__name__})"
            for name, layer in stage.named_modules()
            if getattr(layer, "batch_first", None) is False
        ]
        self._first: Tensor | None = None

    def check(self, value: PyTree, output: PyTree) -> None:
        """Record the first micro-batch of a batch; compare it with the second.

        Raises:
            ConfigurationError: The outputs for both together differ.
        """
        if not self._names or is_recomputing():
            return
        if not (_is_batch(value) and _is_batch(output) and len(output) == len(value)):
            self._names = []
            return
        if self._first is None:
            self._first = value.detach()
            return
        first, second = self._first, value.detach()
        names, self._names, self._first = self._names, [], None
        if first.shape[1:] == second.shape[1:] and self._mixes(first, second):
            raise ConfigurationError(
                f"stage {self._stage.index} computes other outputs for two micro-batches together "
                "than for each of them, as layers do whose dimension 0 is the sequence: dimension "
                "0 of inputs, of targets and between layers must be the batch; "
                f"{', '.join(names)}: make it with batch_first=True and give it [batch, sequence, "
                "…], or say num_microbatches=1"
            )

    def _mixes(self, first: Tensor, second: Tensor) -> bool:
        devices = [first.device.index] if first.is_cuda else []
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices),
            self._buffers.untouched(),
            _evaluating(self._stage),
            enable_recomputing(),
        ):
            apart = [self._stage.forward(x) for x in (first, second, first)]
            together = self._stage.forward(torch.cat([first, second]))
        if not (_is_batch(together) and together.is_floating_point()):
            return False
        bound = tolerance_of(together) * together.abs().max()
        if (apart[0] - apart[2]).abs().max() > bound:
            return False  # random numbers, also in evaluation
        return bool((torch.cat(apart[:2]) - together).abs().max() > bound)


def _is_batch(value: object) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
        return False
    return value.dim() > 0 and value.numel() > 0


@contextmanager
def _evaluating(layers: nn.Module) -> Iterator[None]:
    """Run the body with the layers in evaluation mode, without dropout."""
    training = [layer for layer in layers.modules() if layer.training]
    for layer in training:
        layer.training = False
    try:
        yield
    finally:
        for layer in training:
            layer.training = True
