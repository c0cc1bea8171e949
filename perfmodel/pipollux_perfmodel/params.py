"""The numbers that describe a job: its step times (`PerfParams`) and its gradients (`GradParams`).

The formulas they enter are in `steptime` and `goodput`. The first seven fields of `PerfParams` are
those of Pollux (Qiao et al., OSDI'21, section 3.2) and AdaptDL, in their order, so
`PerfParams(*seven)` describes a job of one stage; the last three describe a GPipe pipeline.
"""

from __future__ import annotations

import math
from typing import NamedTuple

# A backward pass costs about two forward passes.
FORWARD_SHARE = 1 / 3
BACKWARD_SHARE = 2 / 3

_SHARE_TOLERANCE = 1e-6


class PerfParams(NamedTuple):
    """Step time parameters of a job.

    One micro-batch of b samples takes C(b) = alpha_c + beta_c·b over all K stages, forward and
    backward (with recomputation, where the job recomputes): `forward_shares[k]` of that in the
    forward of stage k, `backward_shares[k]` in its backward.

    Example:
        >>> PerfParams(0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5).num_stages
        1
    """

    alpha_c: float
    """Seconds a micro-batch costs whatever its size: C(b) = alpha_c + beta_c·b."""
    beta_c: float
    """Seconds per sample: C(b) = alpha_c + beta_c·b."""
    alpha_n: float
    """Seconds to synchronise two replicas on two nodes: T_net = alpha_n + beta_n·(R - 2)."""
    beta_n: float
    """Seconds per replica beyond two, across nodes: T_net = alpha_n + beta_n·(R - 2)."""
    alpha_r: float
    """Seconds to synchronise two replicas on one node: T_net = alpha_r + beta_r·(R - 2)."""
    beta_r: float
    """Seconds per replica beyond two, on one node: T_net = alpha_r + beta_r·(R - 2)."""
    gamma: float
    """Overlap of compute and network, 1 (none) to 10 (about full):
    T_optim = (T_pipe^gamma + T_net^gamma)^(1/gamma)."""
    forward_shares: tuple[float, ...] = (FORWARD_SHARE,)
    """φ_k, one per stage: stage k's forward takes φ_k·C(b). Σφ + Σψ = 1."""
    backward_shares: tuple[float, ...] = (BACKWARD_SHARE,)
    """ψ_k, one per stage: stage k's backward takes ψ_k·C(b). Σφ + Σψ = 1."""
    overlap: float = 1.0
    """ω in [0, 1], how far stages run side by side: 0 not at all, 1 as an ideal GPipe pipeline."""

    @property
    def num_stages(self) -> int:
        """K, the number of stages."""
        return len(self.forward_shares)


class GradParams(NamedTuple):
    """Size and noise of a job's gradient at its initial batch size (Pollux, section 3.1)."""

    sqr: float
    """Squared norm of the true gradient, |E g|²."""
    var: float
    """Variance of the gradient of one batch of the initial batch size, E|g - E g|²."""


def even_shares(num_stages: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the forward and backward shares of `num_stages` equally slow stages.

    Raises:
        ValueError: when `num_stages` is below 1.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages is {num_stages}; give at least one stage")
    return (FORWARD_SHARE / num_stages,) * num_stages, (BACKWARD_SHARE / num_stages,) * num_stages


def check_shares(forward_shares: tuple[float, ...], backward_shares: tuple[float, ...]) -> None:
    """Refuse shares that do not split C(b) over the stages.

    Raises:
        ValueError: when the lengths differ or are zero, a share is negative or not finite, or the
            shares do not sum to 1.
    """
    if not forward_shares or len(forward_shares) != len(backward_shares):
        raise ValueError(
            f"forward_shares has {len(forward_shares)} and backward_shares "
            f"{len(backward_shares)} entries; give one of each per stage"
        )
    for name, shares in (("forward_shares", forward_shares), ("backward_shares", backward_shares)):
        for stage, share in enumerate(shares):
            if not (math.isfinite(share) and share >= 0):
                raise ValueError(f"{name}[{stage}] is {share}; give a finite share >= 0")
    total = math.fsum(forward_shares) + math.fsum(backward_shares)
    if abs(total - 1) > _SHARE_TOLERANCE:
        raise ValueError(
            f"forward_shares and backward_shares sum to {total:g}; "
            "divide each by the total so that they sum to 1"
        )
