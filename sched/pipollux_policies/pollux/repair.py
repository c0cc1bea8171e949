"""Repair of infeasible states, the constraint side of the genetic algorithm.

Jobs are served one after another, each in one shape, and each is reduced to the room that earlier
jobs left: only whole replicas on each node, no node with another distributed job, at most
`max_replicas`; a job with fewer than `min_replicas` left gets nothing. Pinned jobs come first and
keep their allocations. All states of a population are repaired at once.
"""

from __future__ import annotations

import numpy as np

from pipollux_policies.placement.node_choice import Bools, Ints, num_fitting

from .problem import AllocationProblem


def repair(problem: AllocationProblem, states: Ints, rng: np.random.Generator) -> Ints:
    """Return feasible states near `states`: (P, I, N) -> (P, I, N); feasible ones stay unchanged.
    Random are the order of the jobs, their shape, and the nodes that lose surplus replicas.
    """
    cluster = problem.cluster
    result = np.zeros_like(states)
    result[:, cluster.pinned] = cluster.base[cluster.pinned]
    free = np.broadcast_to(problem.free, (len(states), *problem.free.shape)).copy()
    distributed = np.zeros((len(states), states.shape[2]), dtype=bool)
    for job in rng.permutation(cluster.movable_jobs):
        for row, members in _choose_rows(cluster.spans[job], states, rng):
            if problem.max_replicas[row] < problem.min_replicas[row]:
                continue
            limit = num_fitting(cluster.needs[row], free[members]) * cluster.allowed[row]
            cells = np.minimum(states[members, row], limit)
            cells = _cut(cells, int(problem.max_replicas[row]), rng)
            cells = _keep_apart(cells, distributed[members])
            cells[cells.sum(axis=1) < problem.min_replicas[row]] = 0
            result[members, row] = cells
            free[members] -= cells[:, :, None] * cluster.needs[row]
            distributed[members] |= (np.count_nonzero(cells, axis=1) > 1)[:, None] & (cells > 0)
    return result


def _choose_rows(
    span: range, states: Ints, rng: np.random.Generator
) -> list[tuple[int, slice | Ints]]:
    """Choose one row of a job for every state, among those that hold replicas."""
    if len(span) == 1:
        return [(span[0], slice(None))]
    held = states[:, span.start : span.stop].any(axis=2)
    chosen = np.where(held, rng.random(held.shape), -1.0).argmax(axis=1)
    members = [(row, np.flatnonzero(chosen == index)) for index, row in enumerate(span)]
    return [(row, indices) for row, indices in members if len(indices)]


def _cut(cells: Ints, most: int, rng: np.random.Generator) -> Ints:
    if (cells.sum(axis=1) <= most).all():
        return cells
    order = rng.permutation(cells.shape[1])
    kept = np.minimum(np.cumsum(cells[:, order], axis=1), most)
    result = np.empty_like(cells)
    result[:, order] = np.diff(kept, axis=1, prepend=0)
    return result


def _keep_apart(cells: Ints, distributed: Bools) -> Ints:
    """Remove a distributed job from nodes that carry another one. A job that would lose all its
    nodes keeps the one with most replicas, and is not distributed.
    """
    spread = np.count_nonzero(cells, axis=1) > 1
    clash = spread[:, None] & distributed & (cells > 0)
    if not clash.any():
        return cells
    apart = np.where(clash, 0, cells)
    lost = clash.any(axis=1) & ~apart.any(axis=1)
    best = cells[lost].argmax(axis=1)
    apart[np.flatnonzero(lost), best] = cells[lost, best]
    return apart
