"""Operations on all gradients of a process at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["reset_gradients", "scale_gradients"]


def scale_gradients(stages: Sequence[Sequence[tuple[str, nn.Parameter]]], factor: float) -> None:
    """Multiply the gradients of named parameters, by stage, by a factor."""
    if factor == 1.0:
        return
    gradients = [
        p.grad for named in stages for _, p in named if p.requires_grad and p.grad is not None
    ]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def reset_gradients(stages: Sequence[Sequence[tuple[str, nn.Parameter]]], *, zeros: bool) -> None:
    """Drop the gradients of named parameters, by stage; with ``zeros``, zero existing ones."""
    for named in stages:
        for _, parameter in named:
            kept = zeros and parameter.grad is not None
            parameter.grad = torch.zeros_like(parameter) if kept else None
