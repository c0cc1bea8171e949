"""Objectives of the exact policy: sums over jobs, so that a knapsack finds the optimum.

An objective gives every configuration of every job a gain, in any unit, and the policy maximises
the sum. A job's gain must not depend on the allocations of other jobs. `FairSpeedup` is Pollux's
fitness: the power mean is a monotone function of the sum of the jobs' terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from pipollux_policies.allocations.fitness import TOLERANCE, check_power, power_terms
from pipollux_policies.placement.node_choice import Bools, Floats, Ints

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

    def moved_all(
        self, job: int, speedups: Floats, shape: int, replicas: Ints, *, elastic: Bools
    ) -> Floats:
        """Return the gains of several changes of a job, as from `moved`, (C,)."""


class Objective(Protocol):
    """The objective to maximise."""

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
        self._instance, self._fair, self._power = instance, fair, power

    def gains(self) -> Floats:
        table, jobs = self._instance.table, self._instance.jobs
        elastic, restarted = (
            np.array([c.job.change_factor(elastic=elastic) if c.runs else 1.0 for c in jobs])
            for elastic in (True, False)
        )
        factors = np.where(table.elastic, elastic[table.job], restarted[table.job])
        factors[table.stay] = 1.0
        return power_terms(table.speedup / np.array(self._fair)[table.job] * factors, self._power)

    def moved(self, job: int, speedup: float, held: Held, *, elastic: bool = False) -> float:  # noqa: ARG002  # as above
        configs = self._instance.jobs[job]
        factor = configs.job.change_factor(elastic=elastic) if configs.runs else 1.0
        return float(power_terms(np.array(speedup / self._fair[job] * factor), self._power))

    def moved_all(
        self,
        job: int,
        speedups: Floats,
        shape: int,  # noqa: ARG002  # required by the protocol
        replicas: Ints,  # noqa: ARG002  # as above
        *,
        elastic: Bools,
    ) -> Floats:
        info, runs = self._instance.jobs[job].job, self._instance.jobs[job].runs
        resized, restarted = (info.change_factor(elastic=e) if runs else 1.0 for e in (True, False))
        factors = np.where(elastic, resized, restarted)
        return power_terms(speedups / self._fair[job] * factors, self._power)


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
