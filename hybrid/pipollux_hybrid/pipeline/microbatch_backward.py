"""Separate backwards of micro-batches, which give the gradients of each.

Without recomputation the backwards of all micro-batches are one graph, and a parameter receives one
gradient. Gradient noise needs the gradients of each, so iterations that measure it cut the graph at
the outputs and run each micro-batch's part separately, the last one first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge
from torchgpipe.phony import get_phony

from .microbatch import PyTree, flatten, unflatten

__all__ = ["separate"]


def separate(outputs: Sequence[PyTree]) -> list[PyTree]:
    """Return the outputs of micro-batches, detached from graphs that are independent."""
    flat = [flatten(output, "the output of the model") for output in outputs]
    places = [
        (i, n)
        for i, (leaves, _) in enumerate(flat)
        for n, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not places:
        return list(outputs)
    tensors = [flat[i][0][n] for i, n in places]
    edges = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in tensors]
    # Requires a gradient, unlike the detached tensors.
    phony = get_phony(tensors[0].device, requires_grad=True)
    apply: Any = _Separate.apply  # torch does not annotate it
    cut_off = apply(phony, [i for i, _ in places], edges, *(x.detach() for x in tensors))
    for (i, n), tensor in zip(places, cut_off, strict=True):
        flat[i][0][n] = tensor
    return [unflatten(leaves, structure) for leaves, structure in flat]


class _Separate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _phony: Tensor, owners: list[int], edges: list[GradientEdge], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.owners, ctx.edges = owners, edges
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        # Whether the script passed retain_graph=True; PyTorch has no public API for it.
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        for i in sorted(set(ctx.owners), reverse=True):
            reached = [
                (edge, gradient)
                for owner, edge, gradient in zip(ctx.owners, ctx.edges, gradients, strict=True)
                if owner == i and gradient is not None
            ]
            if reached:
                torch.autograd.backward(
                    [e for e, _ in reached], [g for _, g in reached], retain_graph=keep
                )
        return (None, None, None, *(None for _ in gradients))
