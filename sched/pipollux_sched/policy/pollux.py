"""Pollux's allocation policy (OSDI'21, §4.2) for jobs whose replicas are whole pipelines.

`docs/policy-pollux.md` tells where it differs from the paper and from AdaptDL, and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .candidates import starting_states
from .genetic import Evolution, evolve
from .job_info import JobInfo, NodeInfo
from .problem import AllocationProblem, Cluster, Floats, Ints, build_cluster, room
from .repair import repair

MIN_UTILITY = 0.35
MAX_UTILITY = 0.65
"""The band of cluster utility within which the number of nodes is left as it is (the paper's)."""


@dataclass(frozen=True)
class _Population:
    """The last population, and what its axes stood for."""

    states: Ints
    cluster: Cluster


class PolluxPolicy:
    """Allocations by NSGA-II over the power mean of the jobs' speedups.

    The policy touches nothing; it remembers only the last population, which the next call starts
    from. Two policies with the same seed that are asked the same things in the same order answer
    the same.

    Args:
        seed: of the policy's own random numbers.
        population: states that survive a generation.
        generations: generations at most.
        power: p of the power mean over jobs; −1 is the paper's.
        patience: generations without any improvement after which the search ends.

    Example:
        >>> linear = JobInfo({"slots": 2}, lambda nodes, replicas: replicas, 0.0, 1, 4)
        >>> node = NodeInfo({"slots": 4})
        >>> PolluxPolicy().optimize({"a": linear}, {"n": node}, {}, node)[0]
        {'a': ['n', 'n']}
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        population: int = 100,
        generations: int = 100,
        power: float = -1.0,
        patience: int = 25,
    ) -> None:
        for name, value in (("population", population), ("generations", generations)):
            if value < 1:
                raise ValueError(f"{name}: {value} must be at least 1")
        if power == 0 or not np.isfinite(power):
            raise ValueError(f"power: {power} must be a finite number other than 0")
        self._rng = np.random.default_rng(seed)
        self._size = population
        self._generations = generations
        self._power = power
        self._patience = patience
        self._previous: _Population | None = None

    def allocate_job(self, job_info: JobInfo, nodes: Mapping[str, NodeInfo]) -> list[str]:
        """Place one arriving job without moving any other: the first node that has room.

        Args:
            job_info: the job.
            nodes: nodes with what is FREE on them.

        Returns:
            `min_replicas` (at least one) replicas on one node, or nothing if no node has room.
        """
        replicas = max(job_info.min_replicas, 1)
        kinds = sorted(job_info.resources)
        need = np.array([job_info.resources[kind] for kind in kinds])
        for name in sorted(nodes, key=lambda name: (nodes[name].preemptible, str(name))):
            free = np.array([nodes[name].resources.get(kind, 0) for kind in kinds])
            if room(need, free) >= replicas:
                return [name] * replicas
        return []

    def optimize(
        self,
        jobs: Mapping[str, JobInfo],
        nodes: Mapping[str, NodeInfo],
        base_allocations: Mapping[str, Sequence[str]],
        node_template: NodeInfo,
    ) -> tuple[dict[str, list[str]], int]:
        """Allocate the whole cluster anew.

        Args:
            jobs: all jobs that are not done, by name.
            nodes: all nodes with what jobs may use of them, by name.
            base_allocations: one node name per replica of each running job. A job that runs on a
                node that is not in `nodes` has to be restarted.
            node_template: a node as could be rented, for the advice on the number of nodes.

        Returns:
            The allocation of every job (an empty list: it waits), feasible on `nodes`, and no worse
            than the current one where that is feasible; and the number of nodes that the paper's
            utility band advises. A job whose allocation is unchanged keeps its very list.
        """
        if not jobs or not nodes:
            return {name: [] for name in jobs}, 1 if jobs else 0
        cluster = build_cluster(jobs, nodes, base_allocations, node_template, len(nodes))
        problem = AllocationProblem(cluster, self._power)
        evolution = self._evolve(problem)
        self._previous = _Population(evolution.states, cluster)
        desired = _desired_nodes(problem, evolution.best, evolution)
        return _allocations(cluster, evolution.best, base_allocations), desired

    def _evolve(self, problem: AllocationProblem) -> Evolution:
        current = repair(problem, problem.cluster.base[None], self._rng)
        start = [starting_states(problem, current[0])]
        if self._previous is not None:
            carried = carry_over(self._previous.states, self._previous.cluster, problem.cluster)
            start.append(repair(problem, carried, self._rng))
        return evolve(
            problem,
            np.concatenate(start),
            self._rng,
            population=self._size,
            generations=self._generations,
            patience=self._patience,
        )


def carry_over(states: Ints, old: Cluster, new: Cluster) -> Ints:
    """Bring states of an earlier cluster to a new one: (P, J, N) -> (P, J', N').

    Jobs that have come hold nothing, jobs that have gone are dropped; a node that has come takes
    over what was planned for a template node. The result need not be feasible.
    """
    result = np.zeros((len(states), *new.base.shape), dtype=np.int64)
    jobs = {name: index for index, name in enumerate(old.job_names)}
    pairs = [(jobs[name], j) for j, name in enumerate(new.job_names) if name in jobs]
    if not pairs:
        return result
    source, target = (list(column) for column in zip(*pairs, strict=True))
    known = {name: index for index, name in enumerate(old.node_names)}
    spare = iter(range(old.num_real, old.base.shape[1]))
    names = [*new.node_names, *[None] * (new.base.shape[1] - new.num_real)]
    for n, name in enumerate(names):
        column = known.get(name) if name is not None else None
        column = next(spare, None) if column is None else column
        if column is not None:
            result[:, target, n] = states[:, source, column]
    return result


def _allocations(
    cluster: Cluster, state: Ints, base_allocations: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for j, name in enumerate(cluster.job_names):
        if not cluster.broken[j] and (state[j] == cluster.base[j]).all():
            result[name] = list(base_allocations.get(name, ()))
        else:
            counts = zip(cluster.node_names, state[j], strict=False)
            result[name] = [node for node, count in counts for _ in range(count)]
    return result


def _desired_nodes(problem: AllocationProblem, best: Ints, evolution: Evolution) -> int:
    """Advise a number of nodes: as it is if the utility is in the band, else nearest its middle.

    A utility above the band only ever asks for more nodes, one below it only for fewer.
    """
    num_real = problem.cluster.num_real
    now = float(problem.utilities(best[None])[0])
    if MIN_UTILITY <= now <= MAX_UTILITY:
        return num_real
    front = _front(evolution.objectives)
    sizes = evolution.objectives[front, 1]
    wanted = sizes > num_real if now > MAX_UTILITY else sizes < num_real
    front, sizes = front[wanted], sizes[wanted]
    utilities = np.append(problem.utilities(evolution.states[front]), now)
    sizes = np.append(sizes, num_real)
    distance = np.abs(utilities - (MIN_UTILITY + MAX_UTILITY) / 2)
    nearest = np.isclose(distance, distance.min())
    return int(max(sizes[nearest].max(), 1))


def _front(objectives: Floats) -> Ints:
    """Return the indices of points that no other point is better than in both objectives."""
    order = np.lexsort((objectives[:, 0], objectives[:, 1]))
    best = np.minimum.accumulate(objectives[order, 0])
    first = np.concatenate([[True], objectives[order[1:], 0] < best[:-1]])
    indices: Ints = order[first]
    return indices
