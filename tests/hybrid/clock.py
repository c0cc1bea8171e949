"""A clock that a test turns on, and layers that take a known time by it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Clock:
    """Time that passes only while something works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def __deepcopy__(self, _memo: object) -> Clock:
        return self


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, clock: Clock, seconds: float) -> Tensor:
        clock.now += seconds
        ctx.clock, ctx.seconds = clock, seconds
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.clock.now += 2 * ctx.seconds
        return gradient, gradient.sum().reshape(1), None, None


class Work(nn.Module):
    """Takes a known time forward, and twice that backward."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Work.apply(x, self.weight, self.clock, self.seconds)
        return result


class PerSample(nn.Module):
    """Takes so many seconds and so many per sample forward, and no parameters."""

    def __init__(self, clock: Clock, alpha: float, beta: float) -> None:
        super().__init__()
        self.clock, self.alpha, self.beta = clock, alpha, beta

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.alpha + self.beta * len(x)
        return x * 1.0
