"""Activation checkpointing with the recomputation apart from the backward.

GPipe recomputes a micro-batch in a stage while the gradient that its backward waits for is still
being computed in the next one. So recomputation (:class:`Recompute`) and backward
(:class:`Checkpoint`) are two nodes of the graph, as in torchgpipe (Kim et al., 2020, section 3.2),
whose switches :func:`torchgpipe.is_checkpointing` and :func:`torchgpipe.is_recomputing` work here
too. Other than torchgpipe's nodes, these let outputs pass that need no gradient, and recompute
under what surrounded the forward (autocast and the like).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchgpipe.checkpoint import (
    enable_checkpointing,
    enable_recomputing,
    restore_rng_states,
    save_rng_states,
)
from torchgpipe.microbatch import Batch
from torchgpipe.phony import get_phony

from pipollux_hybrid.errors import SynchronizationError

from .guards import BeforeForward, StageGuards
from .lanes import fork, join
from .stage import Stage
from .thread_state import ThreadLocalState

__all__ = ["Recomputation", "check_whole_backward", "make_phonies"]

Tensors: TypeAlias = tuple[Tensor, ...]
NO_GRAPH = ("does not require grad and does not have a grad_fn", "register a hook on a tensor")
"""What PyTorch says where :func:`torch.autograd.grad` or ``register_hook`` lacks a graph."""


class Recomputation:
    """One micro-batch in one stage, computed without activations first and with them later.

    Args:
        function: Takes and gives tensors of floating point or complex type.
        stage: Whose layers it runs.
        outer: What surrounded the forward.
        guards: Of the stage.
    """

    def __init__(
        self,
        function: Callable[[Tensors], Tensors],
        stage: Stage,
        outer: ThreadLocalState,
        guards: StageGuards,
    ) -> None:
        self._function, self._stage = function, stage
        self._outer, self._guards = outer, guards
        self._before = BeforeForward([], [])
        self._rng_states: deque[Any] = deque(maxlen=1)
        self._recomputed: tuple[Tensors, Tensors] | None = None
        """Outputs with their graph, and the leaves that it begins with."""

    def forward(self, inputs: Tensors) -> Tensors:
        """Compute the outputs without a graph; to be called where the stage computes."""
        # Something that requires a gradient, so that the engine comes back even if no input does.
        phony = get_phony(inputs[0].device, requires_grad=True)
        apply: Any = Checkpoint.apply  # torch does not annotate it
        return cast("Tensors", apply(phony, self, *inputs))

    def schedule(self, batch: Batch, inputs: Tensors) -> None:
        """Schedule the recomputation for when the backward is about to reach these outputs.

        Args:
            batch: The outputs; the first is replaced.
            inputs: What :meth:`forward` got.
        """
        batch[0], phony = fork(batch[0])
        apply: Any = Recompute.apply  # as above
        batch[0] = join(batch[0], apply(phony, self, *inputs))

    def run_first(self, inputs: Tensors) -> Tensors:
        """Run the first forward, and remember the state of the random generators."""
        save_rng_states(inputs[0].device, self._rng_states)
        if not self._stage.differentiates:
            try:
                return self._run_first(inputs)
            except RuntimeError as error:
                if not any(text in str(error) for text in NO_GRAPH):
                    raise
                self._stage.differentiates = True
        leaves = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs)
        with restore_rng_states(inputs[0].device, self._rng_states.copy()):
            return self._run_first(leaves, torch.enable_grad)

    def _run_first(
        self, inputs: Tensors, mode: Callable[[], AbstractContextManager[None]] = torch.no_grad
    ) -> Tensors:
        with mode(), enable_checkpointing(), self._guards.kept() as self._before:
            # What a layer hands out may be its own buffer, which is not to get into a graph.
            return tuple(output.detach() for output in self._function(inputs))

    def run_again(self, inputs: Tensors) -> None:
        """Run the same forward again, this time with a graph."""
        leaves = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs)
        with (
            self._outer.entered(),
            # A copy, as it takes the state out, and a graph that is retained comes here again.
            restore_rng_states(inputs[0].device, self._rng_states.copy()),
            torch.enable_grad(),
            enable_recomputing(),
            self._guards.replaced(self._before),
        ):
            self._recomputed = (self._function(leaves), leaves)

    def take(self, inputs: Callable[[], Tensors]) -> tuple[Tensors, Tensors]:
        """Return what was recomputed; recompute now if the engine has not done so."""
        if self._recomputed is None:
            self.run_again(inputs())
        assert self._recomputed is not None  # noqa: S101  # run_again has just set it
        recomputed, self._recomputed = self._recomputed, None
        return recomputed


def check_whole_backward() -> None:
    """Refuse a backward for some tensors only, where gradients of parameters are a side effect.

    Raises:
        SynchronizationError: The engine runs for torch.autograd.grad, or backward(inputs=…).
    """
    if not torch.autograd._is_checkpoint_valid():
        raise SynchronizationError(
            "torch.autograd.grad and backward(inputs=…) over a pipeline that recomputes would add "
            "to the gradients of parameters, too: use activation_checkpoint='never', or backward()"
        )


class Checkpoint(torch.autograd.Function):
    """Forward without activations; backward through the recomputed graph."""

    @staticmethod
    def forward(ctx: Any, _phony: Tensor, recomputation: Recomputation, *inputs: Tensor) -> Tensors:
        """Compute the outputs, keeping nothing but the inputs."""
        ctx.recomputation = recomputation
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return recomputation.run_first(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs; those of parameters are accumulated on the way."""
        check_whole_backward()
        outputs, leaves = ctx.recomputation.take(lambda: ctx.saved_tensors)
        reached = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if output.requires_grad and gradient is not None
        ]
        if reached:
            torch.autograd.backward([y for y, _ in reached], [g for _, g in reached])
        return (None, None, *(leaf.grad for leaf in leaves))


class Recompute(torch.autograd.Function):
    """Passes its first argument on; its backward is the recomputation."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, recomputation: Recomputation, *inputs: Tensor) -> Tensor:
        """Keep what the recomputation needs."""
        ctx.recomputation = recomputation
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return phony.view_as(phony)

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor | None) -> tuple[None, ...]:
        """Recompute; there is no gradient to give."""
        ctx.recomputation.run_again(ctx.saved_tensors)
        return (None, None, *(None for _ in ctx.saved_tensors))


def make_phonies(device: torch.device) -> None:
    """Make the tensors without elements that order the backward on a device.

    torchgpipe keeps those of its first forward, which would be of no use to any backward if that
    forward was under :func:`torch.inference_mode`.
    """
    with torch.inference_mode(mode=False):
        for requires_grad in (False, True):
            get_phony(device, requires_grad=requires_grad)
