"""Estimates of how long jobs still train, from completed jobs.

Most users cannot predict when their jobs stop. But jobs come in families (a script that runs again
and again), and most jobs are short. So the remaining work of a job is a distribution, and policies
use all of it (`completion_time`). In seconds of one replica of the job, let a be the work that it
has done, X its whole work, a random variable, and x_i the whole work of a completed job i. The
distribution of X, given that X > a, is a weighted sample of:

* every completed job, at x_i: with `FAMILY_WEIGHT` if it is of the job's family, else with 1. Jobs
  of a family have a similar number of samples, from which x_i follows;
* every unfinished job of its family that declares its whole work, like a completed job;
* a heavy-tailed prior: Pareto's law from `LEAST_WORK` on, with exponent `TAIL` and the weight of
  `TAIL_WEIGHT` completed jobs. Under it, the expected remaining work grows with a;
* for a job that declares its whole work d, instead of the samples above: d · r_i with the same
  weights, where r_i is the error of job i's declaration (trained / declared); and d itself with
  `DECLARED_WEIGHT`.

Samples below a are dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

FAMILY_WEIGHT = 10.0
TAIL_WEIGHT = 2.0
DECLARED_WEIGHT = 20.0
TAIL = 0.5
LEAST_WORK = 60.0
NUM_VALUES = 16
_TAIL_POINTS = 24
_LONGEST_TAIL = 1e3
"""Pareto's law is cut off at this multiple of the work done, as it has no mean."""
_MOST_KEPT = 1000
"""Most completed jobs that count: the last ones in all, and the last ones of each family."""
_MOST_RELATIVES = 64
"""Most unfinished jobs of a family that count: the last ones."""

_NUMBER = re.compile(r"[-_.]?\d+$")


def family_of(name: str) -> str:
    """Return the default family of a job: its name without the number at its end.

    >>> family_of("resnet-17"), family_of("17")
    ('resnet', '17')
    """
    return _NUMBER.sub("", name) or name


@dataclass(frozen=True)
class CompletedJob:
    """The length of a completed job; ValueError if an amount is not above 0."""

    family: str
    samples: float
    """Number of trained samples, in units of the initial batch size's samples."""
    work: float
    """Work done, in seconds of one replica."""
    declared: float | None = None
    """Declared total number of samples; None: not declared."""

    def __post_init__(self) -> None:
        for name in ("samples", "work", "declared"):
            amount = getattr(self, name)
            if amount is not None and not 0 < amount < math.inf:
                raise ValueError(f"{name}: {amount} must be above 0, and finite")


@dataclass
class LengthHistory:
    """The completed jobs of a cluster, and the length estimates that follow from them.

    >>> history = LengthHistory()
    >>> for _ in range(50):
    ...     history.add(CompletedJob("resnet", samples=6000.0, work=60.0))
    >>> left = history.work_left("resnet", trained=1000.0, goodput=100.0)
    >>> left[7]
    50.0
    """

    _all: list[CompletedJob] = field(default_factory=list)
    _families: dict[str, list[CompletedJob]] = field(default_factory=dict)
    _untrained: dict[tuple[Any, ...], tuple[float, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of jobs that count."""
        return len(self._all)

    def add(self, job: CompletedJob) -> None:
        """Add a completed job."""
        self._untrained.clear()
        for jobs in (self._all, self._families.setdefault(job.family, [])):
            jobs.append(job)
            del jobs[:-_MOST_KEPT]

    def extend(self, jobs: Iterable[CompletedJob]) -> None:
        """Add completed jobs."""
        for job in jobs:
            self.add(job)

    def knows(self, *, declared: bool) -> bool:
        """Return whether any job has completed, or, with `declared`, any with a declared length."""
        return any(job.declared for job in self._all) if declared else bool(self._all)

    def work_left(
        self,
        family: str,
        trained: float,
        goodput: float,
        declared: float | None = None,
        relatives: Sequence[float] = (),
    ) -> tuple[float, ...]:
        """Return `NUM_VALUES` equally likely values of a job's remaining work, in ascending order.

        In seconds of one replica; empty while the goodput is unknown. Samples are in units of the
        initial batch size's: `trained`, `declared`, and `relatives`, totals that unfinished jobs of
        its family declare, which are ignored if the job declares one.
        """
        if not 0 < goodput < math.inf or not trained >= 0:
            return ()
        relatives = tuple(relatives[-_MOST_RELATIVES:])
        if trained > 0:
            return self._work_left(family, trained, goodput, declared, relatives)
        asked = family, goodput, declared, relatives
        if asked not in self._untrained:
            if len(self._untrained) >= _MOST_KEPT:
                self._untrained.clear()
            self._untrained[asked] = self._work_left(family, 0.0, goodput, declared, relatives)
        return self._untrained[asked]

    def _work_left(
        self,
        family: str,
        trained: float,
        goodput: float,
        declared: float | None,
        relatives: Sequence[float],
    ) -> tuple[float, ...]:
        done = trained / goodput
        own = self._families.get(family, [])
        if declared is None:
            whole, weights = self._lengths([*(job.samples for job in own), *relatives], goodput)
        else:
            whole, weights = self._errors(own, max(declared, trained) / goodput)
        left, weights = whole[whole > done] - done, weights[whole > done]
        if declared is None or not left.size:
            tail, share = _tail(done)
            left, weights = np.concatenate([left, tail]), np.concatenate([weights, share])
        return _quantiles(left, weights)

    def _lengths(self, samples: Sequence[float], goodput: float) -> _Weighted:
        others = np.array([job.work for job in self._all])
        return _weighted(np.array(samples) / goodput, others)

    def _errors(self, own: list[CompletedJob], declared: float) -> _Weighted:
        mine, others = (
            declared * np.array([job.samples / job.declared for job in jobs if job.declared])
            for jobs in (own, self._all)
        )
        whole, weights = _weighted(mine, others)
        return np.append(whole, declared), np.append(weights, DECLARED_WEIGHT)


_Floats = NDArray[np.float64]
_Weighted = tuple[_Floats, _Floats]


def _weighted(mine: _Floats, others: _Floats) -> _Weighted:
    weights = np.concatenate([np.full(mine.size, FAMILY_WEIGHT), np.ones(others.size)])
    return np.concatenate([mine, others]), weights


def _tail(done: float) -> _Weighted:
    """Return the remaining work under Pareto's law at equally likely points, and their weights."""
    least = max(done, LEAST_WORK)
    survival = (np.arange(_TAIL_POINTS) + 0.5) / _TAIL_POINTS
    survival = survival + (1 - survival) * _LONGEST_TAIL**-TAIL
    weight = TAIL_WEIGHT * (LEAST_WORK / least) ** TAIL
    return least * survival ** (-1 / TAIL) - done, np.full(_TAIL_POINTS, weight / _TAIL_POINTS)


def _quantiles(values: _Floats, weights: _Floats) -> tuple[float, ...]:
    order = np.argsort(values, kind="stable")
    up_to = np.cumsum(weights[order])
    wanted = (np.arange(NUM_VALUES) + 0.5) / NUM_VALUES * up_to[-1]
    return tuple(values[order][np.searchsorted(up_to, wanted)].tolist())
