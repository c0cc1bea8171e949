"""Corrections of goodput by batch size, from measured steps of one allocation.

In the model, every additional sample adds the same time to a step. Measured steps deviate. At the
atomic batch sizes a_i measured on an allocation the residual of the model is known:

    s_i  standard deviation of optimizer steps over their median
    e_i  = log(measured_i / predicted_i) · `TRIAL`² / (`TRIAL`² + s_i²)
                                              of their median, the mean of several with a_i
    e(a) = e_i at a_i, linear in log a between two of them, constant beyond the last
    t(a) = `TRIAL` · min(1, d / `APART`)      d = min over i of |log a − log a_i|

Other load on a machine slows down many consecutive steps, so the median of more steps is no more
accurate: a residual is weighted as the mean of a normal distribution of width s_i with a prior of
width `TRIAL`.

Corrected goodput is exp(t(a) − e(a)) times that of the model. Without t, a size that the model
underestimates would never be measured. With t, a size that promises at least exp(−`TRIAL`) of the
best known goodput is measured once, and then counts by its measurement: optimism in the face of
uncertainty (Lai & Robbins, *Asymptotically efficient adaptive allocation rules*, 1985).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipollux_perfmodel.timing.params import PerfParams
from pipollux_perfmodel.timing.step_time import step_time

from .batch_bounds import Integers
from .batch_size import Floats, Nearby

TRIAL = 0.05
"""Possible underestimation of a size by the model, as a logarithm: the typical error of fits."""
APART = 0.15
"""Log ratio of two sizes from which on their residuals are independent."""


class SizeCorrections:
    """Factors on the goodput of one allocation by atomic batch size.

    Takes the sizes a_i, which may contain duplicates, and their errors e_i. Raises ValueError
    without sizes, for a size below 1, or if the numbers differ.

    >>> corrections = SizeCorrections([16, 64], np.log([1.25, 1.0]))
    >>> corrections.factors([16, 17, 32, 64, 256]).round(2).tolist()
    [0.8, 0.82, 0.94, 1.0, 1.05]
    """

    def __init__(self, atomic_bsz: ArrayLike, errors: ArrayLike) -> None:
        sizes, left_over = np.atleast_1d(atomic_bsz), np.atleast_1d(np.asarray(errors, float))
        if not sizes.size or sizes.min() < 1 or sizes.shape != left_over.shape:
            raise ValueError(
                f"atomic_bsz is {atomic_bsz!r}, errors {errors!r}; give at least one size, each at "
                "least 1, and one error for each"
            )
        distinct, place, counts = np.unique(sizes, return_inverse=True, return_counts=True)
        self.atomic_bsz: Integers = distinct.astype(np.int64)
        self._sizes = np.log(distinct)
        self._errors = np.bincount(place, left_over) / counts

    def factors(self, atomic_bsz: ArrayLike) -> NDArray[np.float64]:
        """Return the factor of every size, which must be at least 1; in the same shape."""
        sizes = np.log(np.asarray(atomic_bsz, float))
        right = np.clip(np.searchsorted(self._sizes, sizes), 1, max(len(self._sizes) - 1, 1))
        ends = self._sizes[np.minimum([right - 1, right], len(self._sizes) - 1)]
        trial = TRIAL * np.minimum(np.abs(sizes - ends).min(axis=0) / APART, 1.0)
        factors: NDArray[np.float64] = np.exp(trial - np.interp(sizes, self._sizes, self._errors))
        return factors


def size_corrections(
    params: PerfParams,
    num_nodes: int,
    num_replicas: int,
    atomic_bsz: ArrayLike,
    optim_step_time: ArrayLike,
    num_microbatches: ArrayLike = 1,
    scatter: ArrayLike = 0.0,
    level: int = 1,
) -> SizeCorrections:
    """Return the residuals of a model on measured optimizer steps of one allocation. The arrays
    have one entry per configuration; `scatter` is s, relative to the median of the steps.

    >>> params = PerfParams(0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5)
    >>> size_corrections(params, 1, 1, [10, 30], [0.4, 0.4]).factors([10, 30]).round(2).tolist()
    [0.5, 1.0]
    """
    sizes = np.atleast_1d(atomic_bsz)
    zeros = np.zeros_like(sizes)
    counts = np.asarray(num_microbatches)
    times = step_time(params, num_nodes, num_replicas, sizes, zeros, counts, level)
    known = TRIAL**2 / (TRIAL**2 + np.asarray(scatter) ** 2)
    return SizeCorrections(sizes, known * np.log(np.asarray(optim_step_time) / times.total))


class _Plain(Protocol):
    def __call__(self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers) -> Floats:
        """Return goodput in shape (candidates, columns)."""

    def of_pairs(self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers) -> Floats:
        """Return goodput of candidates of any columns."""


class CorrectedGoodput:
    """Goodput of candidates (`batch_size.GoodputOf`) of one allocation, corrected by size."""

    def __init__(self, plain: _Plain, corrections: SizeCorrections) -> None:
        self._plain, self._factors = plain, corrections.factors

    def __call__(self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers) -> Floats:
        """Return goodput, shape (candidates, columns)."""
        return self._plain(columns, atomic_bsz, accum_steps) * self._factors(atomic_bsz)

    def of_pairs(self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers) -> Floats:
        """Return goodput of candidates of any columns, all of shape (pairs,)."""
        return self._plain.of_pairs(columns, atomic_bsz, accum_steps) * self._factors(atomic_bsz)

    def estimate(self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers) -> None:
        """Return None: one allocation has few candidates."""

    def most_nearby(
        self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers, nearby: Nearby
    ) -> None:
        """Return None: the factors have no simple bound."""
