"""Feeding the gradient noise scale from what synchronisation leaves behind at each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from .context import JobContext
from .noise import GradientNoiseScale, norm_sqr
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
        self._previous: tuple[list[Tensor | None], float, int] | None = None
        self._steps = 0

    def wanted(self) -> bool:
        """Whether this iteration measures the noise; comparing successive steps takes all."""
        noise = self._context.metrics.noise
        often = noise is None or noise.differenced or noise.grad_params is None
        return often or self._steps < MEASURED_AT_FIRST or self._steps % MEASURED_EVERY == 0

    def stepped(self) -> None:
        """The optimizer stepped."""
        self._steps += 1

    def measure(self, result: SyncResult) -> None:
        """Take in what the synchronisation of this step found; gradients are the averages now."""
        metrics = self._context.metrics
        if metrics.noise is None:
            limits = metrics.limits
            metrics.noise = GradientNoiseScale(
                limits.init_batch_size if limits else max(result.batch_size, 1)
            )
        if self._context.micro_step is None:
            return  # gradients summed by hand: their weights are not known
        gradients = [p.grad for p in self._trainable()]
        total_sqr = self._norm_sqr(gradients)
        if result.num_estimates > 1:
            self._previous = None
            metrics.noise.update(
                total_sqr=total_sqr,
                estimate_sqr=result.estimate_sqr,
                num_estimates=result.num_estimates,
                batch_size=result.batch_size,
            )
        elif metrics.noise.differenced or metrics.noise.grad_params is None:
            self._difference(metrics.noise, gradients, total_sqr, result.batch_size)

    def _difference(
        self,
        noise: GradientNoiseScale,
        gradients: list[Tensor | None],
        total_sqr: float,
        batch_size: int,
    ) -> None:
        """Take this step and the one before as two estimates: there is no second one in a step."""
        if self._previous is not None:
            before, before_sqr, before_size = self._previous
            both = batch_size + before_size
            mean = [
                a if b is None else b if a is None else (a * batch_size + b * before_size) / both
                for a, b in zip(gradients, before, strict=True)
            ]
            noise.update(
                total_sqr=self._norm_sqr(mean),
                estimate_sqr=(total_sqr * batch_size + before_sqr * before_size) / both,
                num_estimates=2,
                batch_size=both,
                differenced=True,
            )
        copies = [None if g is None else g.detach().clone() for g in gradients]
        self._previous = (copies, total_sqr, batch_size)

    def _norm_sqr(self, gradients: list[Tensor | None]) -> float:
        """|G|² over all stages, in the optimizer's geometry."""
        return sum(
            float(norm_sqr(gradient, self._preconditioner(parameter)))
            for parameter, gradient in zip(self._trainable(), gradients, strict=True)
            if gradient is not None
        )

    def _trainable(self) -> list[nn.Parameter]:
        return [p for p in self._parameters if p.requires_grad]
