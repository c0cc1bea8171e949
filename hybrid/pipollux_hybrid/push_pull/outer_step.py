"""The outer optimizer's state of a layer on a server, and its steps.

A round of a layer is one change Δ = Θ − θ of each replica, where Θ is what it pulled last and θ
what it has now. With all of them, in the mean over samples, the step is SGD's with Nesterov
momentum (DiLoCo, arXiv 2311.08105)::

    g = Σ w·Δ / Σ w      m = β·m + g      Θ = Θ − ε·(g + β·m)

With a quorum, only some of the changes are there. These are applied with their share φ of the
round, and the momentum when the shares add up to 1, as in the delayed Nesterov update (arXiv
2401.09135)::

    now:                  Θ = Θ − ε·Σ φ·Δ
    at the round's end:   m = β·m + mean(Δ of the round)      Θ = Θ − ε·β·m

With all changes in one step both are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .options import OuterSGD

WHOLE = 1.0 - 1e-9
"""Sum of the shares from which a round is complete, for rounding."""


class Change(NamedTuple):
    """A replica's change of the tensors of a layer."""

    weight: float
    """Samples it was trained on."""
    tensors: Sequence[Tensor]


class Share(NamedTuple):
    """What changes of replicas add to a round."""

    fraction: float
    """Their part of the round's weight."""
    tensors: Sequence[Tensor]
    """Sum of the changes, each with its part of the round's weight."""


def share_of(changes: Mapping[int, Change], total: float) -> Share:
    """Return what changes, by replica, add to a round of weight ``total``."""
    sums = [torch.zeros_like(tensor) for tensor in next(iter(changes.values())).tensors]
    if total <= 0.0:
        return Share(0.0, sums)
    for replica in sorted(changes):  # one order of additions, whoever came first
        weight, tensors = changes[replica]
        for added, tensor in zip(sums, tensors, strict=True):
            added.add_(tensor, alpha=weight / total)
    return Share(sum(change.weight for change in changes.values()) / total, sums)


@dataclass
class OuterState:
    """Parameters Θ of a layer, and the outer optimizer's state."""

    values: list[Tensor]
    momentum: list[Tensor] = field(default_factory=list)
    collected: list[Tensor] = field(default_factory=list)
    """Sum of the shares' changes in the round that is not complete."""
    fraction: float = 0.0
    """Sum of these shares."""

    def __post_init__(self) -> None:
        for tensors in (self.momentum, self.collected):
            if not tensors:
                tensors.extend(torch.zeros_like(value) for value in self.values)

    def step(self, share: Share, outer: OuterSGD) -> None:
        """Apply a share of a round."""
        self.fraction += share.fraction
        ends = self.fraction >= WHOLE
        for index, (value, mean) in enumerate(zip(self.values, share.tensors, strict=True)):
            value.sub_(mean, alpha=outer.lr)
            if not outer.momentum:
                continue
            self.collected[index].add_(mean)
            if ends:
                self._end_round(index, value, outer)
        if ends:
            self.fraction = 0.0

    def _end_round(self, index: int, value: Tensor, outer: OuterSGD) -> None:
        momentum, collected = self.momentum[index], self.collected[index]
        if not outer.nesterov:  # Σ ε·g is applied, so that ε·β·m of before is left
            value.sub_(momentum, alpha=outer.lr * outer.momentum)
        momentum.mul_(outer.momentum).add_(collected, alpha=1.0 / self.fraction)
        if outer.nesterov:
            value.sub_(momentum, alpha=outer.lr * outer.momentum)
        collected.zero_()
