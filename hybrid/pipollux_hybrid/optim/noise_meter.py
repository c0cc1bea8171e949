"""Measures the gradient noise scale at some steps, from the results of synchronization.

The noise changes slowly, and a measurement costs a few passes over all gradients, so it is measured
at every step at first, for the first fit, and rarely later. The choice of steps depends only on
their number and on the averages so far, which are equal on all replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor, nn

from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.sync.grad_norms import sum_products
from pipollux_hybrid.sync.sync_result import SyncResult

from .adaptive_optimizer import AdaptiveOptimizer
from .gradient_noise_scale import GradientNoiseScale, MeasuredNoise

MEASURED_AT_FIRST = 24
"""Number of measurements at successive steps at the start of an attempt."""
MEASURED_EVERY = 64
"""Interval of later measurements in steps."""


@dataclass(frozen=True)
class _Step:
    number: int
    gradients: Sequence[Tensor | None]
    """One per parameter, multiplied by the loss scale."""
    batch_size: int
    loss_scale: float


class _Estimates(TypedDict):
    total_sqr: float
    estimate_sqr: float
    batch_size: int


class NoiseMeter:
    """Measures the gradient's noise at some optimizer steps, in the optimizer's geometry."""

    def __init__(
        self,
        ctx: JobContext,
        parameters: Sequence[nn.Parameter],
        optimizer: AdaptiveOptimizer,
    ) -> None:
        self._batch, self._mesh = ctx.batch, ctx.mesh
        self._noise = ctx.component(MeasuredNoise)
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._previous: _Step | None = None
        self._steps = 0
        self._measured_at = -1
        ctx.rejoined.append(self._begin_again)

    def _begin_again(self) -> None:
        """Restart the schedule, as joining replicas do."""
        self._previous, self._steps, self._measured_at = None, 0, -1

    def wanted(self) -> bool:
        """Return whether this iteration is measured, or kept for a comparison with the next one."""
        return self._is_due(self._steps) or (self._differences() and self._is_due(self._steps + 1))

    def prepare(self) -> None:
        """Prepare a measurement of the next iteration; all replicas call it."""
        if self.wanted():
            self._optimizer.share_preconditioners()

    def stepped(self) -> None:
        """Count an optimizer step; all replicas call it."""
        self._steps += 1
        self.prepare()

    def measure(self, result: SyncResult) -> None:
        """Add the measurement of this step's synchronization, after gradients are averaged."""
        scaled_by, self._batch.loss_scale = self._batch.loss_scale, None
        if not self.wanted():
            return
        # The factor of the loss, and so of every gradient.
        loss_scale = 1.0 if scaled_by is None else float(scaled_by)
        self._take_weights()
        noise, limits = self._noise.scale, self._batch.limits
        if noise is None:
            noise = self._noise.scale = GradientNoiseScale(
                limits.init_batch_size if limits else max(result.batch_size, 1)
            )
        if self._batch.micro_step is None:
            return  # gradients summed by hand: their weights are not known
        if result.num_estimates > 1:
            self._take(noise, result, loss_scale)
        elif self._differences():
            self._difference(noise, result.batch_size, loss_scale)

    def _take_weights(self) -> None:
        """Cache the weights of squares at the same steps on all replicas; one with a share of the
        batch has cached them in its backward.
        """
        pairs = zip(self._parameters, self._gradients(), strict=True)
        self._optimizer.preconditioners([p for p, gradient in pairs if gradient is not None])

    def _is_due(self, step: int) -> bool:
        noise = self._noise.scale
        if noise is None:
            return step < MEASURED_AT_FIRST
        if step == 0:
            return False  # no extra work right after a restart or a resize, while all wait
        if step <= MEASURED_AT_FIRST and noise.num_samples < MEASURED_AT_FIRST:
            return True
        return (step - 1) % MEASURED_EVERY == 0

    def _differences(self) -> bool:
        """Return whether successive steps serve as estimates: no step has had several yet."""
        noise = self._noise.scale
        return noise is None or noise.differenced or noise.grad_params is None

    def _take(self, noise: GradientNoiseScale, result: SyncResult, loss_scale: float) -> None:
        self._previous = None
        gradients = self._gradients()
        total_sqr = self._product(gradients, gradients) / loss_scale**2
        if not math.isfinite(total_sqr):
            return  # the loss scale was too large; the step is left out
        noise.update(
            total_sqr=total_sqr,
            estimate_sqr=result.estimate_sqr / loss_scale**2,
            num_estimates=result.num_estimates,
            batch_size=result.batch_size,
            num_steps=self._steps - self._measured_at,
            preconditioned=self._preconditioned(),
        )
        self._measured_at = self._steps

    def _difference(self, noise: GradientNoiseScale, batch_size: int, loss_scale: float) -> None:
        """Use this step and the previous one as two estimates, as each step has only one."""
        before, self._previous = self._previous, None
        if before is not None and before.number == self._steps - 1:
            noise.update(
                **self._compare(before, batch_size, loss_scale),
                num_estimates=2,
                num_steps=self._steps - self._measured_at,
                differenced=True,
                preconditioned=self._preconditioned(),
            )
            self._measured_at = self._steps
        if self._is_due(self._steps + 1):
            copies = self._copies(before.gradients if before is not None else ())
            self._previous = _Step(self._steps, copies, batch_size, loss_scale)

    def _copies(self, used: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return copies of the gradients, which the script may clip in place or set to zero. The
        memory of ``used``, copies of the previous step, is reused: new memory costs a page fault
        every 4 KiB.
        """
        gradients = self._gradients()
        present = [gradient for gradient in gradients if gradient is not None]
        memory = [copy for copy in used if copy is not None]
        if _kinds(gradients) != _kinds(used) or not present:
            return [None if g is None else g.detach().clone() for g in gradients]
        with torch.no_grad():
            torch._foreach_copy_(memory, present)
        return used

    def _compare(self, before: _Step, batch_size: int, loss_scale: float) -> _Estimates:
        """Return |G|², S and B of two steps, over parameters that have a gradient in both."""
        kept, gradients = before.gradients, self._gradients()
        both = [a is not None and b is not None for a, b in zip(kept, gradients, strict=True)]
        first = [a if known else None for a, known in zip(kept, both, strict=True)]
        second = [b if known else None for b, known in zip(gradients, both, strict=True)]
        # The previous step is measured again, as Adam's geometry has changed since.
        first_sqr = self._product(first, first) / before.loss_scale**2
        second_sqr = self._product(second, second) / loss_scale**2
        inner = self._product(first, second) / (before.loss_scale * loss_scale)
        total = before.batch_size + batch_size
        share, rest = before.batch_size / total, batch_size / total
        return {
            # |share · first + rest · second|², without computing the sum
            "total_sqr": share**2 * first_sqr + rest**2 * second_sqr + 2 * share * rest * inner,
            "estimate_sqr": share * first_sqr + rest * second_sqr,
            "batch_size": total,
        }

    def _gradients(self) -> list[Tensor | None]:
        return [p.grad if p.requires_grad else None for p in self._parameters]

    def _product(self, one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> float:
        """Return the inner product over all stages, in the optimizer's geometry."""
        found = [
            (parameter, a, b)
            for parameter, a, b in zip(self._parameters, one, other, strict=True)
            if a is not None and b is not None
        ]
        parameters, ones, others = zip(*found, strict=True) if found else ((), (), ())
        mine = sum_products(ones, others, self._optimizer.preconditioners(parameters))
        return mine if self._mesh is None else self._mesh.sum_over_stages([mine])[0]

    def _preconditioned(self) -> bool:
        first = next((p for p in self._parameters if p.requires_grad and p.grad is not None), None)
        mine = first is not None and self._optimizer.preconditioner(first) is not None
        # A stage may have no parameters, but all stages must agree.
        return mine if self._mesh is None else self._mesh.sum_over_stages([mine])[0] > 0


def _kinds(
    tensors: Sequence[Tensor | None],
) -> list[tuple[torch.device, torch.dtype] | None]:
    """Return the properties of parameters' gradients that may change between steps."""
    return [None if tensor is None else (tensor.device, tensor.dtype) for tensor in tensors]
