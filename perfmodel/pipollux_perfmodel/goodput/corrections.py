"""Corrections of goodput by allocation, from measured steps.

The model of step times has few parameters, so a fit leaves residuals. That of a measured allocation
is known, and similar allocations are likely to have similar ones:

    e_i = log(measured_i / predicted_i)           of allocation i, by its optimizer steps
    e   = the e_i of the allocation itself                        where it was measured
        = Σ w_i · e_i / (Σ w_i + w_0)     w_i = exp(−(log2 R_i − log2 R)² / (2 σ²))   elsewhere

with the i on one node for one node, those of the same network level for several, and |e| <= 1. This
is kernel regression (Nadaraya; Watson; 1964) with the prior that the model is right. The corrected
goodput is exp(−e) times that of the model. The choice of the batch size does not change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipollux_perfmodel.timing.params import PerfParams
from pipollux_perfmodel.timing.step_time import step_time

MAX_RATIOS = 64
_WIDTH = 0.35
"""σ: in doublings of the number of replicas."""
_PRIOR = 0.3
"""w_0: weight of the prior, in measured allocations of the same R."""
_MOST = 1.0
"""Maximum |e|: larger residuals are from different conditions."""
_DIGITS = 4


class StepRatio(NamedTuple):
    """Measured step time of an allocation over the predicted one; the geometric mean of several."""

    num_nodes: int
    num_replicas: int
    ratio: float
    level: int = 1
    """Network level at which several nodes meet; 1 on one node."""


def step_ratios(
    params: PerfParams,
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
    atomic_bsz: ArrayLike,
    optim_step_time: ArrayLike,
    num_microbatches: ArrayLike = 1,
    level: ArrayLike = 1,
) -> tuple[StepRatio, ...]:
    """Return the residuals of a model on measured optimizer steps, by allocation. The arrays have
    one entry per configuration. Returns the `MAX_RATIOS` allocations with the fewest replicas.

    >>> params = PerfParams(0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5)
    >>> step_ratios(params, [1, 1], [1, 1], [10, 30], [0.4, 0.4])
    (StepRatio(num_nodes=1, num_replicas=1, ratio=1.4142, level=1),)
    """
    nodes, replicas, sizes, counts, measured, levels = np.broadcast_arrays(
        num_nodes, num_replicas, atomic_bsz, num_microbatches, optim_step_time, level
    )
    levels = np.where(nodes > 1, levels, 1)
    steps = step_time(params, nodes, replicas, sizes, np.zeros_like(sizes), counts, levels)
    errors_of = np.log(measured / steps.total)
    found: dict[tuple[int, int, int], list[float]] = {}
    for n, r, at, error in zip(nodes, replicas, levels, errors_of, strict=True):
        found.setdefault((int(r), int(n), int(at)), []).append(float(error))
    return tuple(
        StepRatio(n, r, round(float(np.exp(np.clip(np.mean(errors), -_MOST, _MOST))), _DIGITS), at)
        for (r, n, at), errors in sorted(found.items())[:MAX_RATIOS]
    )


class StepCorrections:
    """Factors on a job's goodput by allocation.

    >>> corrections = StepCorrections([StepRatio(1, 4, 1.25)])
    >>> corrections.factors([1, 1, 2], [4, 5, 4]).round(2).tolist()
    [0.8, 0.86, 1.0]
    """

    def __init__(self, ratios: Iterable[StepRatio]) -> None:
        errors: dict[tuple[int, int], list[float]] = {}
        for nodes, replicas, ratio, level in ratios:
            error = float(np.clip(np.log(ratio), -_MOST, _MOST))
            errors.setdefault((level if nodes > 1 else 0, replicas), []).append(error)
        self._levels = np.array([level for level, _ in errors], np.int64)
        self._doublings = np.log2([replicas for _, replicas in errors])
        self._errors = np.array([np.mean(those) for those in errors.values()])

    @property
    def levels(self) -> frozenset[int]:
        """The network levels with measurements."""
        return frozenset(self._levels.tolist()) - {0}

    def factors(
        self, num_nodes: ArrayLike, num_replicas: ArrayLike, level: int = 1
    ) -> NDArray[np.float64]:
        """Return the factor for every allocation; 1.0 without similar measurements. `level` is the
        network level at which several nodes meet.
        """
        nodes, replicas = np.broadcast_arrays(num_nodes, num_replicas)
        # Avoids the logarithm of 0; the factor of no replicas does not matter.
        away = np.log2(np.maximum(replicas, 1))[..., None] - self._doublings
        alike = np.where(nodes > 1, level, 0)[..., None] == self._levels
        weights = alike * np.exp(-((away / _WIDTH) ** 2) / 2)
        expected = weights @ self._errors / (weights.sum(axis=-1) + _PRIOR)
        measured = alike & (away == 0)
        known = measured @ self._errors
        factors: NDArray[np.float64] = np.exp(-np.where(measured.any(axis=-1), known, expected))
        return factors
