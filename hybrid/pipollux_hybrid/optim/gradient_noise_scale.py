"""The gradient noise scale: the statistics behind statistical efficiency.

Symbols, for one optimizer step whose B samples came as J gradient estimates (micro-batches, or
whole atomic batches under ``activation_checkpoint="never"``), estimate j being the mean ĝ_j over
b_j samples:

    G     = Σ_j (b_j / B) ĝ_j       the gradient that the optimizer sees
    S     = Σ_j (b_j / B) |ĝ_j|²
    E|G|² = |g|² + tr Σ / B         g: the true gradient; Σ: covariance of one sample's gradient
    E S   = |g|² + J tr Σ / B

hence, unbiased for any b_j,

    tr Σ = (S − |G|²) · B / (J − 1)      |g|² = (J |G|² − S) / (J − 1)

For equal b_j this is the estimator of McCandlish et al. (An Empirical Model of Large-Batch
Training, 2018) as AdaptDL applies it to replicas; micro-batches let a single replica use it too.
With J = 1 two successive steps serve as two estimates, which mistakes the step between them for
noise: it is the last resort.

``GradParams.var`` is tr Σ / initial batch size and ``GradParams.sqr`` is |g|². For Adam-like
optimizers all norms are taken after dividing by √v̂ + ε, the geometry in which those optimizers
move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from pipollux_hybrid.job.context import JobContext
from pipollux_perfmodel import GradParams

__all__ = ["GradientNoiseScale", "MeasuredNoise", "RunningAverage"]

SMOOTHING = 0.999
"""Weight of the past for one batch of the initial size, as in AdaptDL."""
HORIZON = 32
"""A measured step contributes at most 1/32 to the averages: for rare measurements or large batches,
the past fades by the number of measurements."""


@dataclass
class RunningAverage:
    """An exponential average corrected for its initial value, as in Adam."""

    total: float = 0.0
    weight: float = 0.0

    def update(self, value: float, keep: float) -> None:
        """Add a value; the past has the weight ``keep`` in [0, 1)."""
        self.total = keep * self.total + (1.0 - keep) * value
        self.weight = keep * self.weight + (1.0 - keep)

    @property
    def value(self) -> float:
        """The average; 0 before the first value."""
        return self.total / self.weight if self.weight > 0.0 else 0.0


@dataclass
class GradientNoiseScale:
    """Running estimates of |g|² and tr Σ / initial batch size.

    Example:
        >>> noise = GradientNoiseScale(init_batch_size=32)
        >>> noise.update(total_sqr=1.5, estimate_sqr=3.0, num_estimates=4, batch_size=32)
        >>> noise.grad_params
        GradParams(sqr=1.0, var=0.5)
    """

    init_batch_size: int
    differenced: bool = False
    """Whether the averages come from successive steps."""
    preconditioned: bool = False
    """Whether norms are taken in Adam's geometry."""
    num_samples: int = 0
    """Measured steps in the averages."""
    _sqr: RunningAverage = field(default_factory=RunningAverage)
    _var: RunningAverage = field(default_factory=RunningAverage)

    def update(
        self,
        *,
        total_sqr: float,
        estimate_sqr: float,
        num_estimates: int,
        batch_size: int,
        differenced: bool = False,
        num_steps: int = 1,
        preconditioned: bool = False,
    ) -> None:
        """Add the measurement of one optimizer step.

        Args:
            total_sqr: |G|².
            estimate_sqr: S.
            num_estimates: J, at least 2.
            batch_size: B, in samples.
            differenced: Whether the estimates are successive steps; estimates within a step replace
                these.
            num_steps: Number of steps since the last measurement: the past fades as if each were
                measured, but no faster than :data:`HORIZON` allows.
            preconditioned: Whether norms are taken in Adam's geometry; norms in two geometries have
                no common average, so the later ones replace the earlier.
        """
        if num_estimates < 2 or not (math.isfinite(total_sqr) and math.isfinite(estimate_sqr)):
            return
        if (self.differenced and not differenced) or self.preconditioned != preconditioned:
            self._sqr, self._var, self.num_samples = RunningAverage(), RunningAverage(), 0
        self.differenced, self.preconditioned = differenced, preconditioned
        sqr = (num_estimates * total_sqr - estimate_sqr) / (num_estimates - 1)
        trace = (estimate_sqr - total_sqr) * batch_size / (num_estimates - 1)
        fading = SMOOTHING ** (max(num_steps, 1) * batch_size / self.init_batch_size)
        keep = max(fading, 1.0 - 1.0 / HORIZON)
        self.num_samples += 1
        self._sqr.update(sqr, keep)
        self._var.update(trace / self.init_batch_size, keep)

    @property
    def grad_params(self) -> GradParams | None:
        """The current estimate; None before the first."""
        if self._var.weight == 0.0:
            return None
        # The estimates may be negative, the true values are not.
        return GradParams(sqr=max(self._sqr.value, 0.0), var=max(self._var.value, 1e-6))

    def gain(self, scale: float) -> float:
        """Return AdaScale's gain r of a batch ``scale`` times the initial one, in [1, scale]: one
        such step is worth r steps of the initial size (Johnson et al., AdaScale SGD, 2020).
        """
        params = self.grad_params if scale > 1.0 else None
        if params is None:
            return 1.0
        return (params.var + params.sqr) / (params.var / scale + params.sqr)

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers for a checkpoint."""
        return {
            "init_batch_size": self.init_batch_size,
            "differenced": self.differenced,
            "preconditioned": self.preconditioned,
            "samples": self.num_samples,
            "sqr": [self._sqr.total, self._sqr.weight],
            "var": [self._var.total, self._var.weight],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> GradientNoiseScale:
        """Restore the result of :meth:`to_json`."""
        return cls(
            init_batch_size=int(content["init_batch_size"]),
            differenced=bool(content["differenced"]),
            preconditioned=bool(content.get("preconditioned", False)),
            num_samples=int(content.get("samples", 0)),
            _sqr=RunningAverage(*map(float, content["sqr"])),
            _var=RunningAverage(*map(float, content["var"])),
        )


class MeasuredNoise:
    """The noise scale of the job in training."""

    def __init__(self, ctx: JobContext) -> None:  # noqa: ARG002  # a component of the job's
        self.scale: GradientNoiseScale | None = None
        """None until the first measured step."""
