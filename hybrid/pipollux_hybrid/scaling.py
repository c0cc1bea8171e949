"""How the learning rate follows the batch size.

A rule gives the factor on the learning rate for a batch ``scale`` times the initial one, of which
one step is worth ``gain`` initial steps (:meth:`~pipollux_hybrid.noise.GradientNoiseScale.gain`).
"""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["AdaScale", "AdamScale", "LinearScale", "ScalingRule", "SquareRootScale", "default_rule"]


class ScalingRule(Protocol):
    """Anything that turns scale and gain into a factor on the learning rate."""

    def factor(self, scale: float, gain: float) -> float:
        """The factor, 1 at scale 1."""
        ...


class AdaScale:
    """The gain itself, for SGD: Johnson et al., AdaScale SGD, ICML 2020."""

    def factor(self, scale: float, gain: float) -> float:  # noqa: ARG002  # the protocol's
        """The gain, between 1 and ``scale``."""
        return gain


class AdamScale:
    """The square root of the gain, for Adam and its kin, as AdaptDL has it."""

    def factor(self, scale: float, gain: float) -> float:  # noqa: ARG002  # the protocol's
        """√gain."""
        return float(gain**0.5)


class LinearScale:
    """Proportional to the batch size: Goyal et al., Accurate, Large Minibatch SGD, 2017."""

    def factor(self, scale: float, gain: float) -> float:  # noqa: ARG002  # the protocol's
        """``scale``."""
        return scale


class SquareRootScale:
    """The square root of the batch size: Krizhevsky, One weird trick, 2014."""

    def factor(self, scale: float, gain: float) -> float:  # noqa: ARG002  # the protocol's
        """√scale."""
        return float(scale**0.5)


def default_rule(optimizer: torch.optim.Optimizer) -> ScalingRule:
    """AdamScale for optimizers that divide by a running second moment, AdaScale for others."""
    return AdamScale() if is_adam_like(optimizer) else AdaScale()


def is_adam_like(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer keeps ``exp_avg_sq`` and corrects it by its ``betas``."""
    adams = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
    return isinstance(optimizer, adams)
