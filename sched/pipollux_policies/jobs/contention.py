"""The number of unfinished jobs over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


class Contention:
    """The number of unfinished jobs over time.

    Args:
        lifetimes: (arrival, completion) of every job.

    Example:
        >>> Contention([(0.0, 10.0), (5.0, 10.0)]).mean(0.0, 10.0)
        1.5
    """

    def __init__(self, lifetimes: Sequence[tuple[float, float]]) -> None:
        ends = np.array(lifetimes, dtype=float).reshape(-1, 2)
        changes = np.concatenate([ends[:, 0], ends[:, 1]])
        steps = np.repeat([1.0, -1.0], len(ends))
        order = np.argsort(changes, kind="stable")
        self._times = changes[order]
        counts = np.cumsum(steps[order])
        self._area = np.concatenate([[0.0], np.cumsum(np.diff(self._times) * counts[:-1])])

    def mean(self, begin: float, end: float) -> float:
        """Return the time average from `begin` to `end`."""
        low, high = np.interp([begin, end], self._times, self._area)
        return float((high - low) / (end - begin))

    def means(self, arrivals: Mapping[str, float], now: float) -> dict[str, float]:
        """Return the time average over each job's life until `now`, of jobs that arrived before."""
        old = {name: arrival for name, arrival in arrivals.items() if arrival < now}
        begins = np.array([*old.values()])
        low = np.interp(begins, self._times, self._area)
        high = np.interp(now, self._times, self._area)
        means = np.maximum((high - low) / (now - begins), 1.0)  # at least the job itself
        return dict(zip(old, means.tolist(), strict=True))
