"""Correction of forecasts by the errors of past ones.

Samples know neither how wrong models are, nor what a simulation leaves out. Gradients become
noisier in training, for instance, so that large batches are worth more later than a job has
measured so far. Past forecasts tell. The score of one is its error in terms of its own spread, in
logarithms of the time from the forecast to the end:

    score = (log actual - log median) / (log quantile - log median + ERROR)

with the 90 % quantile for an end after the median, and the 10 % quantile (with its sign) for one
before. New quantiles are those of the scores, weighted, in terms of the new spread. Scores of the
job's family have `FAMILY_WEIGHT`, others 1. Without past forecasts, scores are normal, with their
10 % and 90 % quantiles at -1 and 1: the samples' own quantiles, `ERROR` further apart.

Starts have scores of their own, and a smaller spread (`spread_of_starts`): a wait averages over the
ends of several jobs, of any families.

The running time of a job that has not started is corrected within the samples, so that a job which
waits for several others averages over their errors: a new job knows only how its family began, when
gradients have less noise. Its predicted running time is multiplied by the median of the factors by
which those of its family were longer or shorter in the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from pipollux_policies.jobs.lengths import FAMILY_WEIGHT

HORIZON = 30 * 86400.0
"""Seconds ahead that forecasts cover."""
LOW, HIGH = 0.1, 0.9
"""The interval covers 80 %."""
ERROR = 0.5
"""Spread of the logarithm of the time to an end that samples do not contain; chosen as the other
constants here were, by `benchmarks/forecast`, on workloads that it does not report."""
START_ERROR = 0.3
"""The least of the time to a start: see `spread_of_starts`."""
PRIOR_WEIGHT = 20.0
"""Weight of the normal scores, in past forecasts."""
_PRIOR_PLACES = (0.1, 0.3, 0.5, 0.7, 0.9)
_PRIOR = [NormalDist().inv_cdf(place) / NormalDist().inv_cdf(HIGH) for place in _PRIOR_PLACES]
_LEAST_SECONDS = 1.0
_LARGEST_SCORE = 20.0


class Estimate(NamedTuple):
    """A moment as an 80 % interval and a median; infinite: unknown, or beyond the horizon."""

    low: float
    """10 % quantile."""
    median: float
    high: float
    """90 % quantile."""


@dataclass(frozen=True)
class PastError:
    """The error of one past forecast."""

    family: str
    """Of its job."""
    score: float | None
    """Of its end; None: no end was known."""
    start: float | None = None
    """Score of its start; None: it had started, or no start was known."""
    running: float | None = None
    """Logarithm of the true over the predicted running time, of a job that had not started."""


def score(uncorrected: Estimate, now: float, actual: float, error: float = ERROR) -> float | None:
    """Return the score of a forecast that was made at `now`; None: it was not known.

    >>> score(Estimate(20.0, 40.0, 80.0), now=0.0, actual=80.0, error=0.0)
    1.0
    """
    low, median, high = (_logarithm(moment, now) for moment in uncorrected)
    if not math.isfinite(median):
        return None
    apart = _logarithm(actual, now) - median
    spread = (high - median if apart > 0 else median - low) + error
    if not math.isfinite(spread):
        return 0.0
    if not spread:
        return math.copysign(_LARGEST_SCORE, apart) if apart else 0.0
    return min(max(apart / spread, -_LARGEST_SCORE), _LARGEST_SCORE)


def spread_of_starts(
    num_started: int, error: float = ERROR, start_error: float = START_ERROR
) -> float:
    """Return the spread of the logarithm of the time to a start, while so many jobs run.

    Behind a single job it is that of its end. The ends of several are independent in part only.
    Scores of past starts are always in terms of the least one.

    >>> spread_of_starts(1), spread_of_starts(2) < 0.36, spread_of_starts(9)
    (0.5, True, 0.3)
    """
    return max(start_error, error / math.sqrt(max(num_started, 1)))


def running_error(predicted: float | None, actual: float) -> float | None:
    """Return the error of a running time, in logarithms; None: none was predicted.

    >>> round(running_error(10.0, 20.0), 4)
    0.6931
    """
    if predicted is None:
        return None
    return math.log(max(actual, _LEAST_SECONDS) / max(predicted, _LEAST_SECONDS))


def corrected(
    uncorrected: Estimate,
    now: float,
    family: str = "",
    past: Sequence[PastError] = (),
    error: float = ERROR,
) -> Estimate:
    """Return an estimate of a later moment as corrected by past errors.

    >>> corrected(Estimate(20.0, 40.0, 80.0), 0.0, error=0.0)
    Estimate(low=20.0, median=40.0, high=80.0)
    """
    if uncorrected.low <= now and uncorrected.high <= now:
        return uncorrected
    low, median, high = (_logarithm(moment, now) for moment in uncorrected)
    if not math.isfinite(median):
        return uncorrected
    known = [(one.family, one.score) for one in past if one.score is not None]
    values = np.array([*_PRIOR, *(value for _, value in known)])
    weights = np.array(
        [PRIOR_WEIGHT / len(_PRIOR)] * len(_PRIOR)
        + [FAMILY_WEIGHT if family and of == family else 1.0 for of, _ in known]
    )
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    places = (np.cumsum(weights) - weights / 2) / weights.sum()

    def at(place: float) -> float:
        found = float(np.interp(place, places, values))
        if abs(found) < 1e-12:  # the median itself, also of an infinite spread
            return uncorrected.median
        spread = (high - median if found > 0 else median - low) + error
        return now + math.exp(min(median + found * spread, 700.0))

    moments = [at(place) for place in (LOW, 0.5, HIGH)]
    return Estimate(*(m if m <= now + HORIZON else math.inf for m in moments))


def _logarithm(moment: float, now: float) -> float:
    return math.log(max(moment - now, _LEAST_SECONDS))
