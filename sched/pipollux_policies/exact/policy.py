"""The exact policy: a knapsack over all configurations of all jobs, a placement, and a bound.

As a sum over jobs (`objective`), the best choice within the cluster's total slots is a
multiple-choice knapsack, solved exactly and fast (`relaxation`). Its value is an upper bound on any
allocation. The placement (`assignment`) mostly reaches it, and is then optimal. Otherwise small
clusters are solved exactly as a mixed-integer program (`milp`); for large ones the gap between both
values bounds the loss. A job moves only if the objective gains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pipollux_policies.allocations.allocation import Allocation, as_allocation
from pipollux_policies.jobs.job_info import JobInfo, NodeInfo
from pipollux_policies.placement.first_fit import place_arrival
from pipollux_policies.placement.node_choice import Floats, Ints

from .assignment import Assignment, Placed
from .completion_time import CompletionTime
from .configurations import Instance, JobConfigurations, build_instance
from .level_gains import LevelGains
from .milp import solve_whole
from .objective import Objective, ObjectiveValue
from .relaxation import relax
from .reservation import Reservations

_TOLERANCE = 1e-9
_MOST_CROSSED = 1e-3
"""Relative loss from jobs at higher network levels up to which no other arrangement is tried."""
_SMALL = 30
"""Most cells (jobs × nodes × shapes) of a cluster that is solved exactly."""


@dataclass(frozen=True)
class Certificate:
    """An upper bound on the loss against the optimum."""

    value: float
    bound: float
    """A sum of gains that no allocation exceeds."""

    @property
    def gap(self) -> float:
        """The largest possible loss, relative to the bound; 0.0: the answer is optimal."""
        return max(self.bound - self.value, 0.0) / max(abs(self.bound), 1e-300)


class ExactPolicy:
    """Allocates by exact optimization.

    Args:
        objective: the objective to maximize; None: `CompletionTime()`. With `FairSpeedup()` the
            policy solves Pollux's own problem.

    Example:
        >>> job = JobInfo({"slots": 1}, lambda nodes, replicas: replicas, 0.0, 1, 4)
        >>> node = NodeInfo({"slots": 4})
        >>> ExactPolicy().optimize({"a": job}, {"n": node}, {}, node)[0]
        {'a': ['n', 'n', 'n', 'n']}
    """

    adapts_batch_size: ClassVar[bool] = True

    def __init__(self, objective: Objective | None = None) -> None:
        self._objective = CompletionTime() if objective is None else objective

    @property
    def options(self) -> dict[str, Any]:
        """The options of its `CompletionTime` that differ from the default."""
        objective = self._objective
        return objective.options if isinstance(objective, CompletionTime) else {}

    allocate_job = staticmethod(place_arrival)

    def optimize(
        self,
        jobs: Mapping[Any, JobInfo],
        nodes: Mapping[Any, NodeInfo],
        base_allocations: Mapping[Any, Sequence[Any]],
        node_template: NodeInfo,
    ) -> tuple[dict[Any, Allocation], int]:
        """Allocate the whole cluster.

        Args:
            jobs: all jobs that are not done, by name.
            nodes: all nodes with the resources that jobs may use, by name.
            base_allocations: one node name per replica of each running job.
            node_template: a node that could be rented; fair shares count its resources.

        Returns:
            The allocation of every job (empty: the job is queued), and the present number of nodes;
            `autoscale` decides how many there should be.
        """
        allocations, _ = self.solve(jobs, nodes, base_allocations, node_template)
        return allocations, len(nodes)

    def solve(
        self,
        jobs: Mapping[Any, JobInfo],
        nodes: Mapping[Any, NodeInfo],
        base_allocations: Mapping[Any, Sequence[Any]],
        node_template: NodeInfo,
    ) -> tuple[dict[Any, Allocation], Certificate]:
        """Allocate like `optimize`, and return a bound on the loss."""
        instance = build_instance(jobs, nodes, base_allocations, node_template)
        promises = self._objective.promise(instance)
        if promises.closed:
            instance = build_instance(jobs, nodes, base_allocations, node_template, promises.closed)
        result = {
            name: as_allocation(jobs[name], held, nodes) for name, held in instance.pinned.items()
        }
        worth = self._objective.judge(instance, promises)
        placed, certificate = _solve(instance, worth, worth.gains(), promises)
        for configs, found in zip(instance.jobs, placed, strict=True):
            held = base_allocations.get(configs.name, ())
            result[configs.name] = _allocation(instance, configs, found, held)
        return {name: result[name] for name in jobs}, certificate


def _solve(
    instance: Instance, worth: ObjectiveValue, gains: Floats, promises: Reservations
) -> tuple[list[Placed], Certificate]:
    if not instance.jobs or not instance.nodes.names:
        nothing = [Placed(0, (), gain) for gain in gains[instance.table.first[:-1]].tolist()]
        total = float(sum(found.gain for found in nothing))
        return nothing, Certificate(total, total)
    chosen, bound = relax(instance, gains)
    at_levels = LevelGains(instance, worth, gains)
    at_levels.expect(instance.table.first[:-1] + chosen)
    best = _arrange(instance, worth, gains, at_levels, chosen, bound)
    if not all(best.keeps(job) for job in promises.places):
        kept = Assignment(instance, worth, gains, at_levels)
        kept.fill_promised(promises.places, chosen)
        kept.improve()
        best = max(best, kept, key=lambda arrangement: arrangement.total)
    certificate = Certificate(best.total, bound)
    placed = best.placed
    if certificate.gap > _TOLERANCE and _is_small(instance):
        whole = solve_whole(instance, worth, gains)
        if whole is not None:
            total = float(sum(found.gain for found in whole))
            if total > best.total + _TOLERANCE * abs(total):
                placed, certificate = whole, Certificate(total, bound)
    return placed, certificate


def _arrange(
    instance: Instance,
    worth: ObjectiveValue,
    gains: Floats,
    at_levels: LevelGains,
    chosen: Ints,
    bound: float,
) -> Assignment:
    """Return the best of several arrangements; among equals the one with the fewest moves."""

    def filled(
        chosen: Ints, *, keep: bool = True, at_home: bool = False
    ) -> tuple[Assignment, bool]:
        assignment = Assignment(instance, worth, gains, at_levels)
        complete = assignment.fill(chosen, keep=keep, at_home=at_home)
        assignment.improve()
        return assignment, complete

    unmoved = Assignment(instance, worth, gains, at_levels)
    tried = [unmoved] if unmoved.stay() else []
    first, complete = filled(chosen)
    tried.append(first)
    if not complete or (first.crossed and bound - first.total > _MOST_CROSSED * abs(bound)):
        fitting, _ = relax(instance, gains, whole_nodes=True)
        tried.append(filled(chosen, keep=False)[0])
        tried.append(filled(fitting)[0])
        if instance.table.elastic.any():
            tried.append(filled(chosen, at_home=True)[0])
    best = tried[0]
    for other in tried[1:]:
        if other.total > best.total + _TOLERANCE * abs(best.total):
            best = other
    return best


def _is_small(instance: Instance) -> bool:
    return len(instance.table.shapes) * len(instance.nodes.names) <= _SMALL


def _allocation(
    instance: Instance, configs: JobConfigurations, found: Placed, held: Sequence[Any]
) -> Allocation:
    if not found.nodes:
        return Allocation()
    shape = configs.shapes[found.shape]
    several = len(found.nodes) > 1
    level = instance.nodes.topology.level(n for n, _ in found.nodes) if several else 1
    stay = configs.stay
    if stay is not None and found.nodes == configs.base and configs.shape[stay] == found.shape:
        return Allocation(held, shape, level)
    names = instance.nodes.names
    placed = [names[node] for node, count in found.nodes for _ in range(count)]
    return Allocation(placed, shape, level)
