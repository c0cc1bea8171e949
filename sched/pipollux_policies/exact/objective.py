"""Objectives of the exact policy: sums over jobs, so that a knapsack finds the optimum.

An objective gives every configuration of every job a gain, in any unit, and the policy maximizes
the sum. A job's gain must not depend on the allocations of other jobs. `FairSpeedup` is Pollux's
fitness: the power mean is a monotone function of the sum of the jobs' terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from pipollux_policies.allocations.fitness import TOLERANCE, check_power, power_terms
from pipollux_policies.placement.node_choice import Floats, Ints

from .configurations import Instance, JobConfigurations
from .reservation import Reservations


class Held(NamedTuple):
    """A job's shape and replicas, on any nodes."""

    shape: int
    replicas: int


class ObjectiveValue(Protocol):
    """The gains of one instance."""

    def gains(self) -> Floats:
        """Return the gains of all configurations, (P,), in the order of `Instance.table`. Gains of
        configurations that a resize can reach assume a survivor.
        """

    def moved(self, job: int, speedup: float, held: Held, *, elastic: bool = False) -> float:
        """Return the gain of a job whose allocation changes; `elastic`: a replica survives."""

    def moved_all(self, configs: Ints, speedups: Floats) -> Floats:
        """Return the gains of changes to configurations with other speedups, as from `moved`: (C,)
        indices into `Instance.table` and speedups -> (C,).
        """


class Objective(Protocol):
    """The objective to maximize."""

    def promise(self, instance: Instance) -> Reservations:
        """Return the promises of room that come before any gain."""

    def judge(self, instance: Instance, promises: Reservations) -> ObjectiveValue:
        """Return the gains of all jobs' configurations; a broken promise outweighs all gains. The
        instance lacks the room on nodes that the promises close.
        """


class FairSpeedup:
    """Pollux's objective: the power mean of speedups over the fair share, with factors for changes.

    Args:
        power: p of the power mean; −1 is the paper's.

    Raises:
        ValueError: the power is 0 or not finite.
    """

    def __init__(self, power: float = -1.0) -> None:
        self._power = check_power(power)

    def promise(self, instance: Instance) -> Reservations:  # noqa: ARG002  # required by the protocol
        """Promise nothing: the mean itself favours the jobs that have least."""
        return Reservations()

    def judge(self, instance: Instance, promises: Reservations) -> ObjectiveValue:  # noqa: ARG002  # as above
        """Return every configuration's term of the power mean."""
        fair = [fair_speedup(instance, configs) for configs in instance.jobs]
        return _FairWorth(instance, fair, self._power)


class _FairWorth:
    def __init__(self, instance: Instance, fair: Sequence[float], power: float) -> None:
        self._instance, self._fair, self._power = instance, np.array(fair), power

    def gains(self) -> Floats:
        table = self._instance.table
        factors = self._factors(slice(None))
        factors[table.stay] = 1.0
        return power_terms(table.speedup / self._fair[table.job] * factors, self._power)

    def moved(self, job: int, speedup: float, held: Held, *, elastic: bool = False) -> float:  # noqa: ARG002  # as above
        configs = self._instance.jobs[job]
        factor = configs.job.change_factor(elastic=elastic) if configs.runs else 1.0
        return float(power_terms(np.array(speedup / self._fair[job] * factor), self._power))

    def moved_all(self, configs: Ints, speedups: Floats) -> Floats:
        fair = self._fair[self._instance.table.job[configs]]
        return power_terms(speedups / fair * self._factors(configs), self._power)

    def _factors(self, configs: Ints | slice) -> Floats:
        """Return the factor of a change to each configuration."""
        table = self._instance.table
        elastic, restarted = self._of_jobs
        job = table.job[configs]
        factors: Floats = np.where(table.elastic[configs], elastic[job], restarted[job])
        return factors

    @cached_property
    def _of_jobs(self) -> tuple[Floats, Floats]:
        """The factors of jobs that are resized, and restarted."""
        elastic, restarted = (
            np.array(
                [
                    configs.job.change_factor(elastic=elastic) if configs.runs else 1.0
                    for configs in self._instance.jobs
                ]
            )
            for elastic in (True, False)
        )
        return elastic, restarted


def fair_speedup(instance: Instance, configs: JobConfigurations) -> float:
    """Return a job's speedup on 1/J of the nodes that it can run on, in its best shape."""
    nodes, job = instance.nodes, configs.job
    found = [0.0]
    for shape in configs.shapes:
        if not nodes.per_node(shape):
            continue
        equal = np.ceil(1.0 / (nodes.share(shape) * instance.num_jobs) - TOLERANCE)
        replicas = int(min(max(equal, job.least_replicas), job.most_replicas(shape)))
        found.append(nodes.lone_speedup(shape, replicas))
    return max(found) or 1.0
