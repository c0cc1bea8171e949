"""The exact policy: a knapsack over all options of all jobs, then a placement, with a proof.

Written down as a sum over jobs (`objective`), the best allocation that the cluster's slots allow is
a multiple-choice knapsack, solved exactly and fast (`relaxation`). Its value bounds what any
allocation can reach. The placement (`assignment`) mostly reaches it, and is then optimal; where it
does not, small clusters are solved whole as a mixed-integer program (`milp`), and for large
ones the gap between both values says how much may have been lost at most.

Further than the knapsack goes the policy is as stubborn as the objective: what does not gain is not
moved, and an allocation that is kept keeps its very list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pipollux_sched.policy.allocation import Allocation, shape_of
from pipollux_sched.policy.job_info import JobInfo, NodeInfo
from pipollux_sched.policy.placement.first_fit import place_arrival

from .assignment import Assignment, Placed
from .completion_time import CompletionTime
from .configurations import Floats, Instance, JobOptions, build_instance
from .milp import solve_whole
from .objective import Objective, Worth
from .promise import Promises
from .relaxation import relax

_TOLERANCE = 1e-9
_SMALL = 30
"""Cells, jobs times nodes times shapes, up to which a cluster is solved whole."""


@dataclass(frozen=True)
class Certificate:
    """How good an answer is."""

    value: float
    """The sum of gains that was reached."""
    bound: float
    """A sum that no allocation can exceed."""

    @property
    def gap(self) -> float:
        """What may have been lost at most, relative to the bound; 0.0: the answer is optimal."""
        return max(self.bound - self.value, 0.0) / max(abs(self.bound), 1e-300)


class ExactPolicy:
    """Allocates by exact optimisation.

    Args:
        objective: the objective to maximise; None: `CompletionTime()`. With
            `FairSpeedup()` it solves Pollux's own problem.

    Example:
        >>> job = JobInfo({"slots": 1}, lambda nodes, replicas: replicas, 0.0, 1, 4)
        >>> node = NodeInfo({"slots": 4})
        >>> ExactPolicy().optimize({"a": job}, {"n": node}, {}, node)[0]
        {'a': ['n', 'n', 'n', 'n']}
    """

    adapts_batch_size: ClassVar[bool] = True

    def __init__(self, objective: Objective | None = None) -> None:
        self._objective = CompletionTime() if objective is None else objective

    def allocate_job(self, job_info: JobInfo, nodes: Mapping[Any, NodeInfo]) -> Allocation:
        """Place one arriving job without moving any other (`place_arrival`).

        Args:
            job_info: the job.
            nodes: nodes with what is FREE on them.
        """
        return place_arrival(job_info, nodes)

    def optimize(
        self,
        jobs: Mapping[Any, JobInfo],
        nodes: Mapping[Any, NodeInfo],
        base_allocations: Mapping[Any, Sequence[Any]],
        node_template: NodeInfo,
    ) -> tuple[dict[Any, Allocation], int]:
        """Allocate the whole cluster anew.

        Args:
            jobs: all jobs that are not done, by name.
            nodes: all nodes with what jobs may use of them, by name.
            base_allocations: one node name per replica of each running job.
            node_template: a node as could be rented; fair shares count what such a node holds.

        Returns:
            The allocation of every job (an empty list: it waits), and the number of nodes there
            are: how many there should be is `autoscale`'s question.
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
        """Allocate as `optimize` does, and say how good the answer is."""
        instance = build_instance(jobs, nodes, base_allocations, node_template)
        promises = self._objective.promise(instance)
        if promises.closed:
            instance = build_instance(jobs, nodes, base_allocations, node_template, promises.closed)
        result = {
            name: Allocation(held, shape_of(jobs[name], held, nodes))
            for name, held in instance.pinned.items()
        }
        worth = self._objective.judge(instance, promises)
        gains = [worth.gains(job) for job in range(len(instance.jobs))]
        placed, certificate = _solve(instance, worth, gains, promises)
        for options, found in zip(instance.jobs, placed, strict=True):
            held = base_allocations.get(options.name, ())
            result[options.name] = _allocation(instance, options, found, held)
        return {name: result[name] for name in jobs}, certificate


def _solve(
    instance: Instance, worth: Worth, gains: Sequence[Floats], promises: Promises
) -> tuple[list[Placed], Certificate]:
    if not instance.jobs or not instance.nodes.names:
        nothing = [Placed(0, (), float(gain[0])) for gain in gains]
        total = float(sum(found.gain for found in nothing))
        return nothing, Certificate(total, total)
    chosen, bound = relax(instance, gains)
    best = _arrange(instance, worth, gains, chosen)
    if not all(best.placed[job].row for job in promises.places):
        kept = Assignment(instance, worth, gains)
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
    instance: Instance, worth: Worth, gains: Sequence[Floats], chosen: Sequence[int]
) -> Assignment:
    """Try several arrangements; of those that are as good the one that moves least comes first."""
    unmoved = Assignment(instance, worth, gains)
    tried = [unmoved] if unmoved.stay() else []
    first, complete = _filled(instance, worth, gains, chosen, keep=True)
    tried.append(first)
    if not complete:
        fitting, _ = relax(instance, gains, whole_nodes=True)
        tried.append(_filled(instance, worth, gains, chosen, keep=False)[0])
        tried.append(_filled(instance, worth, gains, fitting, keep=True)[0])
    best = tried[0]
    for other in tried[1:]:
        if other.total > best.total + _TOLERANCE * abs(best.total):
            best = other
    return best


def _filled(
    instance: Instance,
    worth: Worth,
    gains: Sequence[Floats],
    chosen: Sequence[int],
    *,
    keep: bool,
) -> tuple[Assignment, bool]:
    """Return an arrangement, and whether every job got what was chosen for it."""
    assignment = Assignment(instance, worth, gains)
    complete = assignment.fill(chosen, keep=keep)
    assignment.improve()
    return assignment, complete


def _is_small(instance: Instance) -> bool:
    rows = sum(len(options.shapes) for options in instance.jobs)
    return rows * len(instance.nodes.names) <= _SMALL


def _allocation(
    instance: Instance, options: JobOptions, found: Placed, held: Sequence[Any]
) -> Allocation:
    if not found.row:
        return Allocation()
    shape = options.shapes[found.shape]
    stay = options.stay
    if stay is not None and found.row == options.base and options.shape[stay] == found.shape:
        return Allocation(held, shape)
    names = instance.nodes.names
    return Allocation([names[node] for node, count in found.row for _ in range(count)], shape)


__all__ = ["Certificate", "ExactPolicy"]
