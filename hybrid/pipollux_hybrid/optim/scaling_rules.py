"""Scaling rules of the learning rate for the batch size.

A rule computes a factor on the learning rate of the next optimizer step. It applies to that step
alone: schedulers and scripts read and write the rate of the initial batch size in ``param_groups``.
All parameter groups share one factor, as statistical efficiency is one number of the whole model.
`docs/howto/batch-size.md` compares the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pipollux_hybrid.errors import at_least, check_values

__all__ = [
    "AdaScale",
    "AdamScale",
    "LEGWScale",
    "LinearScale",
    "ScalingRule",
    "ScalingState",
    "SquareRootScale",
    "default_rule",
]


@dataclass(frozen=True, kw_only=True)
class ScalingState:
    """Arguments of a scaling rule before an optimizer step."""

    scale: float
    """Batch size over the initial batch size."""
    gain: float
    """Steps of the initial batch size that this step is worth, in [1, scale]
    (:meth:`pipollux_hybrid.optim.gradient_noise_scale.GradientNoiseScale.gain`); 1 until the noise
    is measured."""
    progress: float = 0.0
    """Steps of the initial batch size that all steps so far were worth."""
    step: int = 0
    """Optimizer steps so far."""
    init_batch_size: int = 1
    """Samples of the initial batch size."""


class ScalingRule(Protocol):
    """The interface of scaling rules; custom rules implement it.

    Example::

        class HalfLinear:
            def factor(self, state: ScalingState) -> float:
                return 1 + (state.scale - 1) / 2
    """

    def factor(self, state: ScalingState) -> float:
        """Return the factor on the learning rate of the next step."""
        ...


class AdaScale:
    """The gain, for SGD with or without momentum.

    Source: Johnson et al., AdaScale SGD: A User-Friendly Algorithm for Distributed Training, ICML
    2020, algorithm 1: r = (σ² + μ²) / (σ²/S + μ²), η = r · η₁. With S = ``scale``, σ² = tr Σ /
    initial batch size and μ² = |g|².
    """

    def factor(self, state: ScalingState) -> float:
        """Return the gain, between 1 and the scale."""
        return state.gain


class AdamScale:
    """The square root of the gain, for optimizers that divide by the gradient's root mean square.

    Source: AdaptDL's rule for Adam. That the square root is Adam's law where noise
    dominates (there gain = scale) is derived in Malladi et al., On the SDEs and Scaling Rules for
    Adaptive Gradient Algorithms, NeurIPS 2022, definition 5.2; their rule also moves the betas,
    which this does not.
    """

    def factor(self, state: ScalingState) -> float:
        """Return √gain, between 1 and √scale."""
        return float(state.gain**0.5)


class LinearScale:
    """Proportional to the batch size.

    Source: Goyal et al., Accurate, Large Minibatch SGD, 2017, section 2.1. Their warm-up is left to
    the script's scheduler.
    """

    def factor(self, state: ScalingState) -> float:
        """Return the scale."""
        return state.scale


class SquareRootScale:
    """The square root of the batch size.

    Source: Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014,
    section 5: keeps the variance of a step's gradient noise.
    """

    def factor(self, state: ScalingState) -> float:
        """Return √scale."""
        return float(state.scale**0.5)


LEGW = {
    "base_warmup_epochs": at_least(0, "a number of epochs of at least 0 is needed"),
    "data_size": at_least(1, "the samples of an epoch, at least 1, are needed", whole=True),
}


class LEGWScale:
    """Square root of the batch size after a linear warm-up whose epochs grow with the batch size.

    Source: You et al., Large-Batch Training for LSTM and Beyond, SC 2019, section 3 (linear-epoch
    gradual warm-up): warm-up epochs k·w₀, then √k·η₀ for a batch k times the initial one. As in
    AdaptDL, the position in the warm-up is measured by progress, so that it survives changes of the
    batch size; the next step counts, so that the first one is not at rate 0.

    Args:
        base_warmup_epochs: w₀, epochs of warm-up at the initial batch size; 0 for none.
        data_size: Samples of an epoch.

    Raises:
        ConfigurationError: An argument is out of range.
    """

    def __init__(self, base_warmup_epochs: float, data_size: int) -> None:
        check_values(LEGW, {"base_warmup_epochs": base_warmup_epochs, "data_size": data_size})
        self.base_warmup_epochs = base_warmup_epochs
        self.data_size = data_size

    def factor(self, state: ScalingState) -> float:
        """Return √scale · min(1, progress including this step / steps of warm-up)."""
        steps_per_epoch = self.data_size / state.init_batch_size
        warmup = self.base_warmup_epochs * state.scale * steps_per_epoch
        done = state.progress + state.gain
        return float(state.scale**0.5) * (min(1.0, done / warmup) if warmup > 0 else 1.0)


def default_rule(optimizer: torch.optim.Optimizer) -> ScalingRule:
    """Return AdamScale for optimizers that divide by a root mean square, else AdaScale."""
    dividing = (
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
    )
    adaptive = is_adam_like(optimizer) or isinstance(optimizer, dividing)
    return AdamScale() if adaptive else AdaScale()


def is_adam_like(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer keeps ``exp_avg_sq`` and corrects it by its ``betas``."""
    adams = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
    return isinstance(optimizer, adams)
