"""What measured steps of one allocation say about its batch sizes, beyond the model.

By the model a step takes longer by the same for every sample more. Measured steps do not, so that
the batch size that is best by the model may be some per cent worse than another. At the atomic
batch sizes a_i that an allocation was measured with it is known what the model leaves over:

    s_i  standard deviation of optimizer steps over their median
    e_i  = log(measured_i / predicted_i) · `TRIAL`² / (`TRIAL`² + s_i²)
                                              of their median, the mean of several with a_i
    e(a) = e_i at a_i, on a line in log a between two of them, and as at the last one beyond
    t(a) = `TRIAL` · min(1, d / `APART`)      d = min over i of |log a − log a_i|

What else a machine does slows many steps on end, so that the median of more of them is no surer. A
difference counts by how large it may be by that: as the mean of a normal distribution of width s_i
with a prior of width `TRIAL`. Where s_i is large the model counts, which is of all steps.

Goodput is exp(t(a) − e(a)) times what the model says. Without t, a size that the model undervalues
would never be measured. With it, one that promises no less than exp(−`TRIAL`) of the best that is
known is measured once, and counts by that from then on: optimism in the face of uncertainty (Lai &
Robbins, *Asymptotically efficient adaptive allocation rules*, 1985).
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
"""How much better a size may be than the model says, as a logarithm: what fits err by."""
APART = 0.15
"""Logarithm of the ratio of two sizes from which on one says nothing of the other."""


class SizeCorrections:
    """Factors on the goodput of one allocation by atomic batch size.

    Args:
        atomic_bsz: a_i, at least one, each at least 1; the same may stand there several times.
        errors: e_i.

    Raises:
        ValueError: there is no size, one is below 1, or there is not one error for each.

    Example:
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
        """Those that were measured, each once, in ascending order."""
        self._sizes = np.log(distinct)
        self._errors = np.bincount(place, left_over) / counts

    def factors(self, atomic_bsz: ArrayLike) -> NDArray[np.float64]:
        """Return the factor of every size, which is at least 1; the same shape."""
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
) -> SizeCorrections:
    """Return what a model leaves over of measured optimizer steps of one allocation.

    Args:
        params: of the model.
        num_nodes: n of the allocation.
        num_replicas: R of the allocation.
        atomic_bsz: samples of a replica, of each configuration measured, as all that follow.
        optim_step_time: seconds.
        num_microbatches: M.
        scatter: s of the steps.

    Example:
        >>> params = PerfParams(0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5)
        >>> size_corrections(params, 1, 1, [10, 30], [0.4, 0.4]).factors([10, 30]).round(2).tolist()
        [0.5, 1.0]
    """
    sizes = np.atleast_1d(atomic_bsz)
    zeros = np.zeros_like(sizes)
    times = step_time(params, num_nodes, num_replicas, sizes, zeros, np.asarray(num_microbatches))
    known = TRIAL**2 / (TRIAL**2 + np.asarray(scatter) ** 2)
    return SizeCorrections(sizes, known * np.log(np.asarray(optim_step_time) / times.total))


class _Plain(Protocol):
    """Goodput by the model (`CandidateGoodput`)."""

    def __call__(self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers) -> Floats:
        """Return it in shape (candidates, columns)."""

    def of_pairs(self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers) -> Floats:
        """Return that of candidates of any columns."""


class CorrectedGoodput:
    """Goodput of candidates (`batch_size.GoodputOf`), corrected by their sizes.

    Args:
        plain: by the model.
        corrections: of all columns, which are one allocation.
    """

    def __init__(self, plain: _Plain, corrections: SizeCorrections) -> None:
        self._plain, self._factors = plain, corrections.factors

    def __call__(self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers) -> Floats:
        """Return goodput, shape (candidates, columns)."""
        return self._plain(columns, atomic_bsz, accum_steps) * self._factors(atomic_bsz)

    def of_pairs(self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers) -> Floats:
        """Return goodput of candidates of any columns, all of shape (pairs,)."""
        return self._plain.of_pairs(columns, atomic_bsz, accum_steps) * self._factors(atomic_bsz)

    def estimate(self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers) -> None:
        """Return no estimate: one allocation has few candidates."""

    def most_nearby(
        self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers, nearby: Nearby
    ) -> None:
        """Return no bound: factors have none that is simple."""
