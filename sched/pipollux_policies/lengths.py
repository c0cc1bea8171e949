"""How long jobs still train, learned from jobs that have completed.

Most users cannot say when their jobs will stop. But jobs come in families, a script that is run
again and again, and most jobs are short. So what a job has left is a distribution, and policies
weigh all of it (`completion_time`). Symbols, in seconds of one replica of the job:

    a    work that it has done
    X    its whole work, a random variable
    x_i  whole work of a job i that has completed

The distribution of X, given that X > a, has these witnesses:

* every completed job, at x_i: with `FAMILY_WEIGHT` if it is of the job's family, else with 1.
  Within a family the number of samples is what the jobs share, so x_i follows from it;
* every other job of its family that is not done and declares its whole work: as a completed one;
* that work is heavy-tailed: Pareto's law from `LEAST_WORK` on, with exponent `TAIL`, which weighs
  as much as `TAIL_WEIGHT` completed jobs. By it, what is left grows with a;
* a job that declares its whole work d: in place of both, d · r_i with the weights above, where r_i
  is by how much job i was wrong (trained / declared); and d itself with `DECLARED_WEIGHT`.

A witness below a is silent.
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
"""Values that stand for a distribution."""
_TAIL_POINTS = 24
_LONGEST_TAIL = 1e3
"""Pareto's law is cut off at so many times what is done, as it has no mean."""
_MOST_KEPT = 1000
"""Completed jobs that count at most: the last ones, and the last ones of each family."""
_MOST_RELATIVES = 64
"""Jobs that count at most of those of a family which are not done: the last ones."""

_NUMBER = re.compile(r"[-_.]?\d+$")


def family_of(name: str) -> str:
    """Return the family of a job that names none: its name without the number at its end.

    Example:
        >>> family_of("resnet-17"), family_of("17")
        ('resnet', '17')
    """
    return _NUMBER.sub("", name) or name


@dataclass(frozen=True)
class CompletedJob:
    """What counts of a job that has completed.

    Raises:
        ValueError: an amount is not above 0.
    """

    family: str
    samples: float
    """That it trained, each worth one of a batch of the initial size."""
    work: float
    """That it did, in seconds of one replica."""
    declared: float | None = None
    """Samples that it had declared to train in all; None: it had not."""

    def __post_init__(self) -> None:
        for name in ("samples", "work", "declared"):
            amount = getattr(self, name)
            if amount is not None and not 0 < amount < math.inf:
                raise ValueError(f"{name}: {amount} must be above 0, and finite")


@dataclass
class LengthHistory:
    """The completed jobs of a cluster, and what they say of the others.

    Example:
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
    """What was said of jobs that have trained nothing yet: thousands alike may wait."""

    def __len__(self) -> int:
        """Return the number of jobs that it has taken in and still counts."""
        return len(self._all)

    def add(self, job: CompletedJob) -> None:
        """Take a completed job in."""
        self._untrained.clear()
        for jobs in (self._all, self._families.setdefault(job.family, [])):
            jobs.append(job)
            del jobs[:-_MOST_KEPT]

    def extend(self, jobs: Iterable[CompletedJob]) -> None:
        """Take completed jobs in."""
        for job in jobs:
            self.add(job)

    def knows(self, *, declared: bool) -> bool:
        """Return whether any job has completed; `declared`: one that had declared its length."""
        return any(job.declared for job in self._all) if declared else bool(self._all)

    def work_left(
        self,
        family: str,
        trained: float,
        goodput: float,
        declared: float | None = None,
        relatives: Sequence[float] = (),
    ) -> tuple[float, ...]:
        """Return equally likely values of the work that a job has left, in ascending order.

        Args:
            family: of the job.
            trained: samples so far, each worth one of a batch of the initial size.
            goodput: of one replica, in such samples per second.
            declared: such samples in all, as the job says; None: it does not say.
            relatives: what others of its family say that are not done; it counts where the job
                does not say.

        Returns:
            `NUM_VALUES` values, in seconds of one replica; none while the goodput is not known.
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
    """Return what Pareto's law says is left, at equally likely points, and their weights."""
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
