"""What allocations are worth: sums over jobs, so that the best one is a knapsack.

An objective gives every option of every job a gain, in any unit; the exact policy makes the sum of
gains as great as it can. What a job gains must not depend on what others get.

`FairSpeedup` is Pollux's fitness (`problem`): the power mean is a monotone function of the sum of
the jobs' terms, so the greatest sum is the greatest fitness.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pipollux_sched.policy.pollux.problem import FLOOR, TOLERANCE, restart_factor

from .configurations import Floats, Instance, JobOptions
from .promise import Promises


class Worth(Protocol):
    """The gains of one instance."""

    def gains(self, job: int) -> Floats:
        """Return the gain of every option of a job: (C,)."""

    def moved(self, job: int, speedup: float) -> float:
        """Return the gain of a job that gets another allocation than it has, by its speedup."""


class Objective(Protocol):
    """The objective to maximise."""

    def promise(self, instance: Instance) -> Promises:
        """Say which jobs are to get something before any gain counts, and where there is room."""

    def judge(self, instance: Instance, promises: Promises) -> Worth:
        """Look at all jobs once, and return what their options are worth.

        Args:
            instance: jobs and nodes, without room on nodes that promises have closed.
            promises: what `promise` said; that one of these gets nothing is to outweigh all else.
        """


class FairSpeedup:
    """Pollux's objective: the power mean of speedups over the fair share, with restart factors.

    Args:
        power: p of the power mean; −1 is the paper's.

    Raises:
        ValueError: the power is 0 or not finite.
    """

    def __init__(self, power: float = -1.0) -> None:
        if power == 0 or not np.isfinite(power):
            raise ValueError(f"power: {power} must be a finite number other than 0")
        self._power = power

    def promise(self, instance: Instance) -> Promises:  # noqa: ARG002  # the protocol's
        """Promise nothing: the mean itself gives most to whoever has least."""
        return Promises()

    def judge(self, instance: Instance, promises: Promises) -> Worth:  # noqa: ARG002  # as above
        """Return every option's term of the power mean."""
        fair = [fair_speedup(instance, options) for options in instance.jobs]
        return _FairWorth(instance.jobs, fair, self._power)


class _FairWorth:
    def __init__(self, jobs: Sequence[JobOptions], fair: Sequence[float], power: float) -> None:
        self._jobs, self._fair, self._power = jobs, fair, power

    def gains(self, job: int) -> Floats:
        options = self._jobs[job]
        values = options.speedup / self._fair[job]
        if options.runs:
            factors = np.full(len(values), restart_factor(options.job))
            if options.stay is not None:
                factors[options.stay] = 1.0
            values = values * factors
        return self._term(values)

    def moved(self, job: int, speedup: float) -> float:
        options = self._jobs[job]
        factor = restart_factor(options.job) if options.runs else 1.0
        return float(self._term(np.array(speedup / self._fair[job] * factor)))

    def _term(self, values: Floats) -> Floats:
        terms: Floats = np.sign(self._power) * np.maximum(values, FLOOR) ** self._power
        return terms


def fair_speedup(instance: Instance, options: JobOptions) -> float:
    """Return a job's speedup on 1/J of the nodes that it can run on, in its best shape."""
    nodes, job = instance.nodes, options.job
    found = [0.0]
    for shape in options.shapes:
        if not nodes.per_node(shape):
            continue
        equal = np.ceil(1.0 / (nodes.share(shape) * instance.num_jobs) - TOLERANCE)
        replicas = int(min(max(equal, job.min_replicas, 1), job.most_replicas(shape)))
        found.append(float(shape.speedup_fn(-(-replicas // nodes.per_node(shape)), replicas)))
    return max(found) or 1.0
