"""Inner products and norms of gradients, in as few passes over memory as they take."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["NormSum", "product", "sum_products"]

CACHED = 1 << 16
"""Elements of a gradient and its weights that fit into a core's cache together."""


def product(one: Tensor, other: Tensor, weights: Tensor | None) -> Tensor:
    """Return the inner product of two gradients of one shape, as a tensor without dimensions, in
    few passes. ``weights`` has one factor per real number; a complex number counts as two.
    """
    a = _flat(one)
    b = a if other is one else _flat(other)
    if weights is None:
        return torch.dot(a, b)
    weights = weights.reshape(-1)
    if a.is_cuda or a.numel() <= CACHED:
        return torch.dot(a, b * weights)
    # Products that stay in the cache are a third faster on a CPU than two full passes.
    parts = zip(a.split(CACHED), b.split(CACHED), weights.split(CACHED), strict=True)
    return torch.stack([torch.dot(x, y * w) for x, y, w in parts]).sum()


def _flat(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    if gradient.dtype not in (torch.float32, torch.float64):
        gradient = gradient.float()
    return gradient.reshape(-1)


class NormSum:
    """Σ factor · |c|² over gradients c that arrive one by one, each with one small kernel."""

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._factor = 1.0
        self._total: Tensor | None = None

    def add(self, gradient: Tensor, weights: Tensor | None, factor: float) -> None:
        """Add a gradient; ``weights`` as in :func:`product`."""
        if factor != self._factor:
            self._gather()
            self._factor = factor
        self._waiting.append(product(gradient, gradient, weights))

    def total(self) -> Tensor | None:
        """Return the sum, a float64 scalar on the gradients' device; None without gradients."""
        self._gather()
        return self._total

    def clear(self) -> None:
        """Start again."""
        self._waiting, self._total = [], None

    def _gather(self) -> None:
        if self._waiting:
            part = torch.stack(self._waiting).sum(dtype=torch.float64) * self._factor
            self._total = part if self._total is None else self._total + part
            self._waiting = []


def sum_products(gradients: Iterable[tuple[Tensor, Tensor, Tensor | None]]) -> float:
    """Return the inner product of two lists of gradients, waiting once per device."""
    terms: dict[torch.device, list[Tensor]] = {}
    for one, other, weights in gradients:
        terms.setdefault(one.device, []).append(product(one, other, weights).double())
    return sum(float(torch.stack(some).sum()) for some in terms.values())
