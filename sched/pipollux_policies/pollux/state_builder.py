"""States of the allocation problem, changed job by job."""

from __future__ import annotations

import numpy as np

from pipollux_policies.placement.node_choice import (
    Bools,
    Ints,
    NodeCounts,
    find_keeping,
    find_nodes,
    num_fitting,
)

from .problem import AllocationProblem


class StateBuilder:
    """A feasible state, and the room on the first `num_nodes` nodes, while jobs are placed."""

    def __init__(self, problem: AllocationProblem, state: Ints, num_nodes: int) -> None:
        self._problem = problem
        cluster = problem.cluster
        movable = state[~cluster.pinned]
        self.state = state.copy()
        self.rows = [cluster.held_row(job, state) for job in range(cluster.num_jobs)]
        held = np.einsum("in,it->nt", movable, cluster.needs[~cluster.pinned])
        self._free: Ints = problem.free - held
        self._free[num_nodes:] = 0
        spread = np.count_nonzero(movable, axis=1) > 1
        self._num_distributed: Ints = np.count_nonzero(movable[spread], axis=0)

    def held(self, job: int) -> Ints:
        """Return a job's replicas: (N,)."""
        cells: Ints = self.state[self.rows[job]]
        return cells

    def remove(self, job: int) -> None:
        """Remove all replicas of a job."""
        self.give(self.rows[job], np.zeros_like(self.held(job)))

    def give(self, row: int, cells: Ints) -> None:
        """Set the cells of the row's job; they must fit."""
        job = int(self._problem.cluster.job_of[row])
        old_row, needs = self.rows[job], self._problem.cluster.needs
        for change, where, what in ((-1, old_row, self.state[old_row]), (1, row, cells)):
            self._free -= change * what[:, None] * needs[where]
            if np.count_nonzero(what) > 1:
                self._num_distributed += change * (what > 0)
        self.state[old_row] = 0
        self.state[row] = cells
        self.rows[job] = row

    def place(self, row: int, num_replicas: int) -> Ints | None:
        """Return nodes for replicas of a row (`find_nodes`), as if its job held none; (N,) or None.

        Of equally tight nodes, the job's current one. Replicas of a resizable job stay in place
        unless the job gains more elsewhere.
        """
        base = self._problem.cluster.base[row]
        counts, closed = self._room_for(row)
        topology = self._problem.cluster.topology
        found = find_nodes(counts, closed, num_replicas, preferred=base > 0, topology=topology)
        if found is None:
            return None
        cells = _cells(found, len(base))
        if not self._problem.cluster.elastic[row]:
            return cells
        keeping = find_keeping(counts, closed, num_replicas, base)
        if keeping is None:
            return cells
        choices = np.stack([_cells(keeping, len(base)), cells])
        best: Ints = choices[self._problem.row_values(row, choices).argmax()]
        return best

    def accepts(self, row: int, cells: Ints) -> bool:
        """Return whether a row's job could hold these cells."""
        counts, closed = self._room_for(row)
        shares = np.count_nonzero(cells) > 1 and bool((closed & (cells > 0)).any())
        return bool((cells <= counts).all()) and not shares

    def _room_for(self, row: int) -> tuple[Ints, Bools]:
        """Return room for a row on each node, and which nodes carry another distributed job."""
        cluster = self._problem.cluster
        job = int(cluster.job_of[row])
        old = self.held(job)
        free = self._free + old[:, None] * cluster.needs[self.rows[job]]
        own = (old > 0) & (np.count_nonzero(old) > 1)
        counts = num_fitting(cluster.needs[row], free) * cluster.allowed[row]
        return counts, self._num_distributed - own > 0


def _cells(nodes: NodeCounts, num_nodes: int) -> Ints:
    cells: Ints = np.zeros(num_nodes, dtype=np.int64)
    for node, count in nodes:
        cells[node] = count
    return cells


def replica_steps(problem: AllocationProblem, row: int, now: int) -> list[int]:
    """Return the replica counts of a row to try above `now`: one more, whole nodes, doublings."""
    least, most = int(problem.min_replicas[row]), int(problem.max_replicas[row])
    per_node = int(problem.fits[row].max())
    steps = {now + 1, now + 2, 2 * now, 4 * now, most, least}
    steps |= {(now // per_node + 1) * per_node} if per_node else set()
    return sorted(step for step in steps if max(now + 1, least) <= step <= most)
