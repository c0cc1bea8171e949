"""Activation checkpointing with recomputation separate from the backward.

GPipe recomputes a micro-batch in a stage while the next stage still computes the gradient for its
backward. So recomputation (:class:`Recompute`) and backward (:class:`Checkpoint`) are two nodes of
the graph, as in torchgpipe (Kim et al., 2020, section 3.2), whose functions
:func:`torchgpipe.is_checkpointing` and :func:`torchgpipe.is_recomputing` work here as well. Unlike
torchgpipe's nodes, these support outputs that need no gradient, and recompute with the forward's
thread-local state (such as autocast).
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
"""PyTorch's messages if :func:`torch.autograd.grad` or ``register_hook`` lacks a graph."""


class Recomputation:
    """One micro-batch in one stage, computed first without and later with activations.

    ``function`` maps tensors of floating point or complex type; ``outer`` is the script's
    thread-local state around the forward.
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
        """Outputs with their graph, and its leaves."""

    def forward(self, inputs: Tensors) -> Tensors:
        """Compute the outputs without a graph; called where the stage computes."""
        # Requires a gradient, so that there is a backward even if no input requires one.
        phony = get_phony(inputs[0].device, requires_grad=True)
        apply: Any = Checkpoint.apply  # torch does not annotate it
        return cast("Tensors", apply(phony, self, *inputs))

    def schedule(self, batch: Batch, inputs: Tensors) -> None:
        """Schedule the recomputation shortly before the backward reaches these outputs.

        ``inputs`` are those of :meth:`forward`; the first output is replaced.
        """
        batch[0], phony = fork(batch[0])
        apply: Any = Recompute.apply  # as above
        batch[0] = join(batch[0], apply(phony, self, *inputs))

    def run_first(self, inputs: Tensors) -> Tensors:
        """Run the first forward, and store the state of the random generators."""
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
            # A layer may return its own buffer, which must not become part of a graph.
            return tuple(output.detach() for output in self._function(inputs))

    def run_again(self, inputs: Tensors) -> None:
        """Run the same forward again, with a graph."""
        leaves = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs)
        with (
            self._outer.entered(),
            # A copy, as restoring consumes the state, and a retained graph comes here again.
            restore_rng_states(inputs[0].device, self._rng_states.copy()),
            torch.enable_grad(),
            enable_recomputing(),
            self._guards.replaced(self._before),
        ):
            self._recomputed = (self._function(leaves), leaves)

    def take(self, inputs: Callable[[], Tensors]) -> tuple[Tensors, Tensors]:
        """Return the recomputed tensors; recompute now if that has not been done."""
        if self._recomputed is None:
            self.run_again(inputs())
        assert self._recomputed is not None  # noqa: S101  # run_again has just set it
        recomputed, self._recomputed = self._recomputed, None
        return recomputed


def check_whole_backward() -> None:
    """Reject a backward for some tensors only, which would change gradients of parameters, too: a
    SynchronizationError in torch.autograd.grad and backward(inputs=…).
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
        """Compute the outputs, and keep only the inputs."""
        ctx.recomputation = recomputation
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return recomputation.run_first(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs; those of parameters are accumulated."""
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
    """Identity of its first argument; its backward is the recomputation."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, recomputation: Recomputation, *inputs: Tensor) -> Tensor:
        """Keep the inputs of the recomputation."""
        ctx.recomputation = recomputation
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return phony.view_as(phony)

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor | None) -> tuple[None, ...]:
        """Recompute; there is no gradient to return."""
        ctx.recomputation.run_again(ctx.saved_tensors)
        return (None, None, *(None for _ in ctx.saved_tensors))


def make_phonies(device: torch.device) -> None:
    """Create the tensors without elements that order the backward on a device.

    torchgpipe caches those of its first forward, which are useless to a backward if that forward
    ran under :func:`torch.inference_mode`.
    """
    with torch.inference_mode(mode=False):
        for requires_grad in (False, True):
            get_phony(device, requires_grad=requires_grad)
