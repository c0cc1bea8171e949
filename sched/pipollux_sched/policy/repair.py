"""Making any state a feasible one, the constraint side of the genetic algorithm.

Jobs are served one after another, each cut down to what those before it left: the replicas that fit
whole on each node, no node that already carries another distributed job, at most `max_replicas`;
who is left with fewer than `min_replicas` gets nothing. Pinned jobs come first and keep what they
have. All states of a population are treated at once.
"""

from __future__ import annotations

import numpy as np

from .problem import AllocationProblem, Bools, Ints, room


def repair(problem: AllocationProblem, states: Ints, rng: np.random.Generator) -> Ints:
    """Return feasible states next to `states`: (P, J, N) -> (P, J, N), feasible rows unchanged.

    A feasible state comes back as it is. The order in which jobs are served, and the nodes that a
    job with too many replicas loses, are drawn from `rng`.
    """
    cluster = problem.cluster
    result = np.zeros_like(states)
    result[:, cluster.pinned] = cluster.base[cluster.pinned]
    free = np.broadcast_to(problem.free, (len(states), *problem.free.shape)).copy()
    distributed = np.zeros((len(states), states.shape[2]), dtype=bool)
    for job in rng.permutation(np.flatnonzero(~cluster.pinned)):
        if problem.max_replicas[job] < problem.min_replicas[job]:
            continue
        row = np.minimum(states[:, job], room(cluster.needs[job], free))
        row = _cut(row, int(problem.max_replicas[job]), rng)
        row = _keep_apart(row, distributed)
        row[row.sum(axis=1) < problem.min_replicas[job]] = 0
        result[:, job] = row
        free -= row[:, :, None] * cluster.needs[job]
        distributed |= (np.count_nonzero(row, axis=1) > 1)[:, None] & (row > 0)
    return result


def _cut(row: Ints, most: int, rng: np.random.Generator) -> Ints:
    """Take replicas from nodes in random order until at most `most` are left."""
    if (row.sum(axis=1) <= most).all():
        return row
    order = rng.permutation(row.shape[1])
    kept = np.minimum(np.cumsum(row[:, order], axis=1), most)
    result = np.empty_like(row)
    result[:, order] = np.diff(kept, axis=1, prepend=0)
    return result


def _keep_apart(row: Ints, distributed: Bools) -> Ints:
    """Take a distributed job off nodes that carry another one.

    One that would lose all its nodes keeps the one with most replicas: it is distributed no more.
    """
    spread = np.count_nonzero(row, axis=1) > 1
    clash = spread[:, None] & distributed & (row > 0)
    if not clash.any():
        return row
    apart = np.where(clash, 0, row)
    lost = clash.any(axis=1) & ~apart.any(axis=1)
    best = row[lost].argmax(axis=1)
    apart[np.flatnonzero(lost), best] = row[lost, best]
    return apart
