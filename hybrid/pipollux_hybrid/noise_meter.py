"""Feeding the gradient noise scale from what synchronisation leaves behind at each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from .context import JobContext
from .noise import GradientNoiseScale, sum_norms_sqr
from .synchronizer import SyncResult

__all__ = ["NoiseMeter"]

MEASURED_AT_FIRST = 50
MEASURED_EVERY = 4
"""The gradient's noise is measured in the first iterations of a run, and then every so many: it
changes slowly, and the hooks that measure it cost time at every gradient."""


class NoiseMeter:
    """Measures the gradient's noise at some optimizer steps.

    Args:
        ctx: The job's context, whose metrics hold the noise scale.
        parameters: The model's parameters.
        preconditioner: Weights of a parameter's squares in norms (Adam's geometry), or None.
    """

    def __init__(
        self,
        ctx: JobContext,
        parameters: Sequence[nn.Parameter],
        preconditioner: Callable[[nn.Parameter], Tensor | None],
    ) -> None:
        self._context = ctx
        self._parameters = list(parameters)
        self._preconditioner = preconditioner
        self._previous: tuple[list[Tensor | None], int] | None = None
        self._steps = 0
        self._measured_at = -1

    def wanted(self) -> bool:
        """Whether this iteration measures the noise; comparing successive steps takes all."""
        noise = self._context.metrics.noise
        often = noise is None or noise.differenced or noise.grad_params is None
        return often or self._steps < MEASURED_AT_FIRST or self._steps % MEASURED_EVERY == 0

    def stepped(self) -> None:
        """The optimizer stepped."""
        self._steps += 1

    def measure(self, result: SyncResult, loss_scale: float = 1.0) -> None:
        """Take in what the synchronisation of this step found; gradients are the averages now.

        Args:
            result: Of the synchronisation.
            loss_scale: What the loss, and so every gradient, was multiplied by.
        """
        metrics = self._context.metrics
        if metrics.noise is None:
            limits = metrics.limits
            metrics.noise = GradientNoiseScale(
                limits.init_batch_size if limits else max(result.batch_size, 1)
            )
        if self._context.micro_step is None:
            return  # gradients summed by hand: their weights are not known
        noise, squared = metrics.noise, loss_scale**2
        gradients = [p.grad for p in self._trainable()]
        total_sqr = self._norm_sqr(gradients)
        if not math.isfinite(total_sqr):
            return  # the loss scale was too large; the step is left out
        if result.num_estimates > 1:
            self._previous = None
            noise.update(
                total_sqr=total_sqr / squared,
                estimate_sqr=result.estimate_sqr / squared,
                num_estimates=result.num_estimates,
                batch_size=result.batch_size,
                num_steps=self._steps - self._measured_at,
                preconditioned=self._preconditioned(),
            )
            self._measured_at = self._steps
        elif noise.differenced or noise.grad_params is None:
            self._difference(noise, gradients, total_sqr / squared, result.batch_size, loss_scale)
            self._measured_at = self._steps

    def _difference(
        self,
        noise: GradientNoiseScale,
        gradients: list[Tensor | None],
        total_sqr: float,
        batch_size: int,
        loss_scale: float,
    ) -> None:
        """Take this step and the one before as two estimates: there is no second one in a step."""
        copies = [None if g is None else g.detach() / loss_scale for g in gradients]
        if self._previous is not None:
            before, before_size = self._previous
            both = batch_size + before_size
            mean = [
                a if b is None else b if a is None else (a * batch_size + b * before_size) / both
                for a, b in zip(copies, before, strict=True)
            ]
            # The step before is measured anew: Adam's geometry has moved since.
            before_sqr = self._norm_sqr(before)
            noise.update(
                total_sqr=self._norm_sqr(mean),
                estimate_sqr=(total_sqr * batch_size + before_sqr * before_size) / both,
                num_estimates=2,
                batch_size=both,
                differenced=True,
                preconditioned=self._preconditioned(),
            )
        self._previous = (copies, batch_size)

    def _norm_sqr(self, gradients: list[Tensor | None]) -> float:
        """|G|² over all stages, in the optimizer's geometry."""
        present = [
            (gradient, self._preconditioner(parameter))
            for parameter, gradient in zip(self._trainable(), gradients, strict=True)
            if gradient is not None
        ]
        return sum_norms_sqr(present)

    def _preconditioned(self) -> bool:
        first = next((p for p in self._trainable() if p.grad is not None), None)
        return first is not None and self._preconditioner(first) is not None

    def _trainable(self) -> list[nn.Parameter]:
        return [p for p in self._parameters if p.requires_grad]
