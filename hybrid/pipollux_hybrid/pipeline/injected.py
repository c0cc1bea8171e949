"""Rejects layers that inject a gradient in the backward.

A custom :class:`torch.autograd.Function` may pass its input through and give an auxiliary loss the
gradient 1 in its backward, regardless of the loss. In a pipeline it would do so for each
micro-batch: M times the plain model's gradient. So first forwards that contain functions of the
script are repeated with a zero gradient of the output, which must give zero gradients of
parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torchgpipe.checkpoint import enable_recomputing

from pipollux_hybrid.errors import ConfigurationError

from .buffer_values import BufferValues
from .contributions import nodes_between
from .microbatch import PyTree, map_tensors, tensors_of
from .stage import Stage

CHECKED_FORWARDS = 32
"""First forwards of a stage with a graph, which are checked."""
KNOWN = ("torch", "torchgpipe", "pipollux_hybrid")
"""Packages whose functions do not inject gradients."""


class InjectionCheck:
    """Checks the first forwards of a stage that have a graph."""

    def __init__(self, stage: Stage, buffers: BufferValues) -> None:
        self._stage, self._buffers = stage, buffers
        self._forwards = 0
        self._cleared: set[str] = set()

    def check(self, value: PyTree, output: PyTree) -> None:
        """Check a forward, if it has a graph and is among the first ones; raise a
        ConfigurationError if parameters or the input get a gradient although the output has none.
        """
        if self._forwards >= CHECKED_FORWARDS:
            return
        roots = [x for x in tensors_of(output) if x.requires_grad]
        if not roots or not torch.is_grad_enabled():
            return
        self._forwards += 1
        custom = set(_custom_functions(roots, tensors_of(value))) - self._cleared
        if not custom:
            return
        self._cleared |= custom
        devices = [x.device.index for x in roots[:1] if x.is_cuda]
        with torch.random.fork_rng(devices), self._buffers.untouched(), enable_recomputing():
            inputs = map_tensors(lambda x: x.detach().requires_grad_(x.requires_grad), value)
            given = tensors_of(inputs)
            # Bypasses the hooks that measure the stage's time.
            again = [x for x in tensors_of(self._stage.forward(inputs)) if x.requires_grad]
        wanted = [x for x in (*self._stage.parameters(), *given) if x.requires_grad]
        if not wanted or not again:
            return
        found = torch.autograd.grad(
            again, wanted, [torch.zeros_like(x) for x in again], allow_unused=True
        )
        if any(gradient is not None and _is_number(gradient) for gradient in found):
            raise ConfigurationError(
                f"stage {self._stage.index} gives its parameters a gradient where the loss gives "
                f"none ({', '.join(sorted(custom))}), as functions do that add the gradient of an "
                "auxiliary loss in the backward: each micro-batch would add it; return the "
                "auxiliary loss as an output of the layers, shape [batch], and add it to the loss"
            )


def _custom_functions(roots: Sequence[Tensor], inputs: Sequence[Tensor]) -> Iterator[str]:
    """Yield the names of the script's functions between inputs and outputs."""
    for node in nodes_between(inputs, roots):
        if isinstance(node, BackwardCFunction):
            function: Any = getattr(node, "_forward_cls", type(node))
            if function.__module__.partition(".")[0] not in KNOWN:
                yield function.__qualname__


def _is_number(gradient: Tensor) -> bool:
    """Return whether there is a finite nonzero number; zero times infinity is NaN."""
    return bool((torch.isfinite(gradient) & (gradient != 0)).any())
