"""torchgpipe's graph nodes between stages, with support for missing gradients.

PyTorch passes zeros in place of missing gradients, unless a node requests None. torchgpipe's nodes
do not, so an output that no later layer uses would receive a zero gradient, and the optimizer would
decay its parameters' weights, unlike in the plain model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchgpipe import copy as gpipe_copy
from torchgpipe import dependency
from torchgpipe.microbatch import Batch
from torchgpipe.phony import get_phony
from torchgpipe.stream import AbstractStream

__all__ = ["copy", "depend", "fork", "join", "wait"]

Gradients = tuple[Tensor | None, ...]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, source: AbstractStream, target: AbstractStream, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return gpipe_copy.Copy.forward(ctx, source, target, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Gradients:
        there = [gradient for gradient in gradients if gradient is not None]
        copied = iter(gpipe_copy.Copy.backward(ctx, *there)[2:])
        return (None, None, *(None if g is None else next(copied) for g in gradients))


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, source: AbstractStream, target: AbstractStream, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return gpipe_copy.Wait.forward(ctx, source, target, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Gradients:
        passed: Any = gradients  # passed on unchanged
        return gpipe_copy.Wait.backward(ctx, *passed)


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return dependency.Fork.forward(ctx, tensor)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor | None, _phony: Tensor | None) -> Tensor | None:
        return gradient


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, phony: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return dependency.Join.forward(ctx, tensor, phony)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor | None) -> Gradients:
        return gradient, None


def fork(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor, and a phony whose users precede the tensor's in the backward."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        apply: Any = _Fork.apply  # torch does not annotate it
        tensor, phony = apply(tensor)
        return tensor, phony
    return tensor, get_phony(tensor.device, requires_grad=False)


def join(tensor: Tensor, phony: Tensor) -> Tensor:
    """Return a tensor whose backward precedes that of a phony."""
    if torch.is_grad_enabled() and (tensor.requires_grad or phony.requires_grad):
        apply: Any = _Join.apply  # as above
        joined: Tensor = apply(tensor, phony)
        return joined
    return tensor


def depend(first: Batch, then: Batch) -> None:
    """Make the backward of the first micro-batch wait for that of the second one."""
    first[0], phony = fork(first[0])
    then[0] = join(then[0], phony)


def copy(batch: Batch, source: AbstractStream, target: AbstractStream) -> None:
    """Copy a micro-batch to the device of a stream; its gradient is copied back."""
    apply: Any = _Copy.apply  # as above
    batch[:] = apply(source, target, *batch)


def wait(batch: Batch, source: AbstractStream, target: AbstractStream) -> None:
    """Make the target stream wait for the source; in the backward the other way round."""
    apply: Any = _Wait.apply  # as above
    batch[:] = apply(source, target, *batch)
