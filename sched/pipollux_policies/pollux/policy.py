"""Pollux's allocation policy (OSDI'21, §4.2) for jobs whose replicas are whole pipelines.

See `docs/concepts/policies.md` for the formula, and `benchmarks/policy-latency/notes.md` for the
differences to the paper.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field

from pipollux_policies.allocations.allocation import Allocation, as_allocation
from pipollux_policies.allocations.fitness import check_power
from pipollux_policies.allocations.rules import Allocations, is_pinned, usable_nodes
from pipollux_policies.autoscaling.utility import UtilityBand, utility
from pipollux_policies.jobs.job_info import JobInfo, NodeInfo, TemplateNode
from pipollux_policies.options import checked
from pipollux_policies.placement.first_fit import place_arrival
from pipollux_policies.placement.node_choice import Floats, Ints

from .arrays import ClusterArrays, build_cluster
from .problem import AllocationProblem
from .repair import repair
from .starting_states import starting_states

if TYPE_CHECKING:
    from .nsga2 import Evolution


@dataclass(frozen=True)
class _Population:
    states: Ints
    cluster: ClusterArrays


class PolluxPolicy:
    """Allocations by NSGA-II over the power mean of the jobs' speedups.

    The policy has no side effects. It keeps only the last population, from which the next call
    starts. Two policies with the same seed return the same results for the same sequence of calls.

    Args:
        seed: of the policy's random numbers.

    Example:
        >>> linear = JobInfo({"slots": 2}, lambda nodes, replicas: replicas, 0.0, 1, 4)
        >>> node = NodeInfo({"slots": 4})
        >>> PolluxPolicy().optimize({"a": linear}, {"n": node}, {}, node)[0]
        {'a': ['n', 'n']}
    """

    @checked
    def __init__(
        self,
        *,
        seed: int = 0,
        population: Annotated[
            int, Field(ge=1, description="Number of states that survive a generation.")
        ] = 100,
        generations: Annotated[
            int, Field(ge=1, description="Largest number of generations.")
        ] = 100,
        power: Annotated[
            float,
            AfterValidator(check_power),
            Field(
                title="a number other than 0",
                description="p of the power mean over jobs; -1 is the paper's.",
            ),
        ] = -1.0,
        patience: Annotated[
            int,
            Field(description="Generations without any improvement after which the search ends."),
        ] = 25,
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._size = population
        self._generations = generations
        self._power = power
        self._patience = patience
        self._previous: _Population | None = None

    def __copy__(self) -> PolluxPolicy:
        """Return an independent policy with the same state."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._rng = copy.deepcopy(self._rng)
        return other

    allocate_job = staticmethod(place_arrival)

    def optimize(
        self,
        jobs: Mapping[Any, JobInfo],
        nodes: Mapping[Any, NodeInfo],
        base_allocations: Allocations,
        node_template: NodeInfo,
    ) -> tuple[dict[Any, Allocation], int]:
        """Allocate the whole cluster.

        Args:
            jobs: all jobs that are not done, by name.
            nodes: all nodes with the resources that jobs may use, by name.
            base_allocations: one node name per replica of each running job. A job on a node that is
                not in `nodes` must restart.
            node_template: a node that could be rented, for the desired number of nodes.

        Returns:
            The allocation of every job (empty: the job is queued), feasible on `nodes`, and no
            worse than the current one if that is feasible; and the number of nodes from the paper's
            utility band. An unchanged allocation keeps its list.
        """
        usable = usable_nodes(nodes)
        if not jobs or not usable:
            return _what_stays(jobs, nodes, base_allocations), 1 if jobs else 0
        cluster = build_cluster(jobs, nodes, base_allocations, node_template, len(usable))
        problem = AllocationProblem(cluster, self._power)
        evolution = self._evolve(problem)
        self._previous = _Population(evolution.states, cluster)
        allocations = _allocations(cluster, evolution.best, base_allocations)
        desired = _desired_nodes(cluster, allocations, evolution, nodes, node_template)
        return allocations, desired

    def _evolve(self, problem: AllocationProblem) -> Evolution:
        from .nsga2 import evolve  # imports slowly

        # Replicas that cannot stay would only block those that can.
        cluster = problem.cluster
        leaving = cluster.broken & ~cluster.elastic
        staying = np.where(leaving[:, None], 0, cluster.base)
        current = repair(problem, staying[None], self._rng)
        start = [starting_states(problem, current[0])]
        if self._previous is not None:
            carried = carry_over(self._previous.states, self._previous.cluster, cluster)
            start.append(repair(problem, carried, self._rng))
        return evolve(
            problem,
            np.concatenate(start),
            self._rng,
            population=self._size,
            generations=self._generations,
            patience=self._patience,
        )


def carry_over(states: Ints, old: ClusterArrays, new: ClusterArrays) -> Ints:
    """Map states of an earlier cluster to a new one: (P, I, N) -> (P, I', N'). New jobs hold
    nothing; a new node inherits the replicas of a template. May be infeasible.
    """
    result = np.zeros((len(states), *new.base.shape), dtype=np.int64)
    rows = {key: row for row, key in reversed(list(enumerate(_row_keys(old))))}
    pairs = [(rows[key], row) for row, key in enumerate(_row_keys(new)) if key in rows]
    if not pairs:
        return result
    source, target = (list(column) for column in zip(*pairs, strict=True))
    known = {name: index for index, name in enumerate(old.node_names)}
    spare = iter(range(old.num_real, old.base.shape[1]))
    names = [*new.node_names, *[None] * (new.base.shape[1] - new.num_real)]
    for n, name in enumerate(names):
        column = known.get(name) if n < new.num_real else None
        column = next(spare, None) if column is None else column
        if column is not None:
            result[:, target, n] = states[:, source, column]
    return result


def _row_keys(cluster: ClusterArrays) -> list[tuple[Any, ...]]:
    pairs = zip(cluster.job_of, cluster.shapes, strict=True)
    return [(cluster.job_names[j], shape.num_stages, shape.gpu_type) for j, shape in pairs]


def _what_stays(
    jobs: Mapping[Any, JobInfo], nodes: Mapping[Any, NodeInfo], base: Allocations
) -> dict[Any, Allocation]:
    """Return the allocations if no node accepts replicas: only pinned jobs keep theirs."""
    result = {name: Allocation() for name in jobs}
    for name, job in jobs.items():
        held = base.get(name, ())
        if is_pinned(job, held, nodes):
            result[name] = as_allocation(job, held, nodes)
    return result


def _allocations(cluster: ClusterArrays, state: Ints, base: Allocations) -> dict[Any, Allocation]:
    result: dict[Any, Allocation] = {}
    for j, name in enumerate(cluster.job_names):
        span = cluster.spans[j]
        kept = (state[span] == cluster.base[span]).all() and not cluster.broken[span[0]]
        if kept:
            held = base.get(name, ())
            shape = cluster.shapes[cluster.base_rows[j]] if held else None
            result[name] = Allocation(held, shape, int(cluster.extents[j, 2]))
        else:
            row = cluster.held_row(j, state)
            result[name] = _as_names(cluster, row, state[row], cluster.node_names)
    return result


def _as_names(cluster: ClusterArrays, row: int, cells: Ints, names: Sequence[Any]) -> Allocation:
    counts = zip(names, cells.tolist(), strict=False)
    placed = [node for node, count in counts for _ in range(count)]
    level = int(cluster.topology.levels(cells))
    return Allocation(placed, cluster.shapes[row] if placed else None, level)


def _desired_nodes(
    cluster: ClusterArrays,
    allocations: Mapping[Any, Allocation],
    evolution: Evolution,
    nodes: Mapping[Any, NodeInfo],
    template: NodeInfo,
) -> int:
    """Return the present number of nodes if the utility is in the band, else the nearest that is. A
    utility above the band can only add nodes, one below it only remove them.
    """
    band, jobs = UtilityBand(), dict(zip(cluster.job_names, cluster.jobs, strict=True))
    used = {node for allocation in allocations.values() for node in allocation}
    now = utility(jobs, {name: nodes[name] for name in used}, allocations)
    if band.low <= now <= band.high:
        return cluster.num_real
    front = _front(evolution.objectives)
    sizes = evolution.objectives[front, 1].astype(int)
    wanted = sizes > cluster.num_real if now > band.high else sizes < cluster.num_real
    candidates = [(abs(now - band.target), -cluster.num_real)]
    for index, size in zip(front[wanted], sizes[wanted], strict=True):
        value = _state_utility(cluster, evolution.states[index], jobs, nodes, template)
        candidates.append((abs(value - band.target), -int(size)))
    nearest = min(distance for distance, _ in candidates)
    return max(*(-size for distance, size in candidates if np.isclose(distance, nearest)), 1)


def _state_utility(
    cluster: ClusterArrays,
    state: Ints,
    jobs: Mapping[Any, JobInfo],
    nodes: Mapping[Any, NodeInfo],
    template: NodeInfo,
) -> float:
    rented = [TemplateNode(number) for number in range(state.shape[1] - cluster.num_real)]
    names = [*cluster.node_names, *rented]
    known = {name: nodes[name] for name in cluster.node_names} | dict.fromkeys(rented, template)
    allocations: dict[Any, Allocation] = {}
    for j, name in enumerate(cluster.job_names):
        row = cluster.held_row(j, state)
        allocations[name] = _as_names(cluster, row, state[row], names)
    used = {node for allocation in allocations.values() for node in allocation}
    return utility(jobs, {name: known[name] for name in used}, allocations)


def _front(objectives: Floats) -> Ints:
    order = np.lexsort((objectives[:, 0], objectives[:, 1]))
    best = np.minimum.accumulate(objectives[order, 0])
    first = np.concatenate([[True], objectives[order[1:], 0] < best[:-1]])
    indices: Ints = order[first]
    return indices
