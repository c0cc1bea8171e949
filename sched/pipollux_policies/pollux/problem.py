"""The allocation problem of Pollux (OSDI'21, §4.2), with replicas that are never split.

Symbols: J jobs, each in one row or several, I rows in all (`arrays`: a row is a job in one of its
shapes), N nodes (the real ones first, then template nodes that could be rented), T kinds of
resources. A state s is an integer array of shape (I, N): s[i, n] replicas of row i on node n,
feasible if

    Σ_i s[i, n] · need[i, t] ≤ capacity[n, t]             a replica lies on one node, whole
    s[i] = 0  for all rows of a job but one              a job runs in one shape
    s[i, n] = 0  unless allowed[i, n]                    the shape is for the node's GPUs
    s[i] = 0  or  min_i ≤ Σ_n s[i, n] ≤ max_i
    s[i] = base[i]                                       for every row of a pinned job
    at most one distributed job (more than one node) on any node, pinned jobs not counted

and is judged by two objectives, both minimized: minus the fitness, and the cluster size.

    fitness = (1/J · Σ_j max(v_j, floor)^p)^(1/p)         p = −1: the harmonic mean
    v_j     = speedup_j(nodes, replicas, shape) / speedup_j(fair share) · change_j
    change  = max(age − lost, 0) / (age + cost)              if a running job is changed, else 1
    lost    = restarts · cost of one + elastic resizes · cost of one
    cost    = that of an elastic resize if a replica survives it (`change_cost`), else of a restart

The fair share of a job is the most that fits into 1/J of its possible nodes, rounded up; of several
shapes, the fastest counts. The floor keeps the mean defined if a job holds nothing: such a job
counts as one with `FLOOR` of its fair share's progress, so that starting it gains more than growing
others.
"""

from __future__ import annotations

import numpy as np

from pipollux_policies.allocations.fitness import TOLERANCE, power_terms
from pipollux_policies.jobs.job_info import ReplicaShape, SpeedupCallable
from pipollux_policies.placement.node_choice import Bools, Floats, Ints, num_fitting

from .arrays import ClusterArrays


class AllocationProblem:
    """Evaluates states of one `ClusterArrays`; the module's text defines every symbol."""

    def __init__(self, cluster: ClusterArrays, power: float = -1.0) -> None:
        self.cluster = cluster
        self.power = power
        self.shape = cluster.base.shape
        jobs = cluster.jobs
        taken = np.einsum("in,it->nt", cluster.base[cluster.pinned], cluster.needs[cluster.pinned])
        self.free: Ints = np.maximum(cluster.capacity - taken, 0)
        self.fits: Ints = self._counts(self.free)
        """(I, N): replicas of a row on a node without other jobs than pinned ones."""
        self.min_replicas: Ints = np.array([jobs[j].least_replicas for j in cluster.job_of])
        pairs = zip(cluster.job_of, cluster.shapes, strict=True)
        self._most: Ints = np.array([jobs[j].most_replicas(shape) for j, shape in pairs])
        self.max_replicas: Ints = np.minimum(self._most, self.fits.sum(axis=1))
        """(I,): at most what fits; if below `min_replicas`, the row stays empty."""
        self.factors: Floats = np.array([job.change_factor(elastic=False) for job in jobs])
        self.resize_factors: Floats = np.array([job.change_factor(elastic=True) for job in jobs])
        self.running: Bools = cluster.extents[:, 1] > 0
        self._speedups = [_SpeedupTable(shape) for shape in cluster.shapes]
        self.shares: Floats = self._dominant_shares()
        """(I,): the largest share of a resource of the possible real nodes that a replica holds."""
        self.fair: Floats = self._fair_speedups()
        self._pinned_speedups = self._speedups_of_pinned()

    def _counts(self, free: Ints) -> Ints:
        counts: Ints = np.stack([num_fitting(need, free) for need in self.cluster.needs])
        return counts * self.cluster.allowed

    def _dominant_shares(self) -> Floats:
        num_real = self.cluster.num_real
        total = self.cluster.allowed[:, :num_real] @ self.cluster.capacity[:num_real]
        # If no real node has a resource, a replica needs all of it.
        shares = np.where(total > 0, self.cluster.needs / np.maximum(total, 1), 1.0)
        shares[self.cluster.needs == 0] = 0.0
        dominant: Floats = shares.max(axis=1)
        return dominant

    def _fair_speedups(self) -> Floats:
        capacity = self._counts(self.cluster.capacity)
        per_node = capacity.max(axis=1)
        speedups = np.zeros(len(self.shares))
        for i in np.flatnonzero(per_node).tolist():
            share = np.ceil(1.0 / (self.shares[i] * self.cluster.num_jobs) - TOLERANCE)
            replicas = int(min(max(share, self.min_replicas[i]), self._most[i]))
            nodes = -(-replicas // int(per_node[i]))
            rooms = self.cluster.topology.largest_rooms(capacity[i])
            level = 1 + np.count_nonzero(rooms[:-1] < replicas)
            speedups[i] = self.speedup(i, *np.array([[nodes], [replicas], [level]]))[0]
        fair: Floats = np.maximum.reduceat(speedups, self.cluster.first_rows)
        return np.where(fair > 0, fair, 1.0)

    def _speedups_of_pinned(self) -> Floats:
        """Return the speedups of pinned jobs, also on draining nodes; 0 for other jobs."""
        speedups = np.zeros(self.cluster.num_jobs)
        for job in np.flatnonzero(self.cluster.pinned[self.cluster.first_rows]).tolist():
            row = int(self.cluster.base_rows[job])
            extent = self.cluster.extents[job]
            speedups[job] = self.speedup(row, *extent[:, None])[0]
        return speedups

    def speedup(self, row: int, num_nodes: Ints, num_replicas: Ints, level: Ints) -> Floats:
        """Return the speedups of a job in a row at network levels; three of (P,) -> (P,)."""
        return self._speedups[row](num_nodes, num_replicas, level)

    def row_values(self, row: int, cells: Ints) -> Floats:
        """Return v of a job that holds only these cells of one row: (P, N) -> (P,)."""
        num_nodes, num_replicas = np.count_nonzero(cells, axis=1), cells.sum(axis=1)
        job = self.cluster.job_of[row]
        level = self.cluster.topology.levels(cells)
        values: Floats = self.speedup(row, num_nodes, num_replicas, level) / self.fair[job]
        if self.running[job]:
            changed = self.cluster.broken[row] | (cells != self.cluster.base[row]).any(axis=1)
            if self.cluster.elastic[row]:
                survives = (np.minimum(cells, self.cluster.base[row]) > 0).any(axis=1)
                values[changed & survives] *= self.resize_factors[job]
                changed &= ~survives
            values[changed] *= self.factors[job]
        return values

    def losses(self, values: Floats) -> Floats:
        """Return the terms of a sum that is least where the power mean is greatest."""
        return -power_terms(values, self.power)

    def values(self, states: Ints) -> Floats:
        """Return v: (P, I, N) -> (P, J)."""
        # Empty rows have value 0, so a job's value is the sum over its rows.
        speedups = self._job_speedups(states)
        changed = self.cluster.per_job((states != self.cluster.base).any(axis=2))
        changed |= self.cluster.broken[self.cluster.first_rows]
        values: Floats = speedups / self.fair
        factors = self.factors
        if self.cluster.elastic.any():
            stays = (np.minimum(states, self.cluster.base) > 0).any(axis=2) & self.cluster.elastic
            factors = np.where(self.cluster.per_job(stays), self.resize_factors, factors)
        return np.where(changed & self.running, values * factors, values)

    def _job_speedups(self, states: Ints) -> Floats:
        num_nodes, num_replicas = np.count_nonzero(states, axis=2), states.sum(axis=2)
        level = self.cluster.topology.levels(states)
        columns = [
            self.speedup(i, num_nodes[:, i], num_replicas[:, i], level[:, i])
            for i in range(states.shape[1])
        ]
        speedups = np.add.reduceat(np.stack(columns, axis=1), self.cluster.first_rows, axis=1)
        pinned = self.cluster.pinned[self.cluster.first_rows]
        return np.where(pinned, self._pinned_speedups, speedups)

    def fitness(self, states: Ints) -> Floats:
        """Return the power mean: (P, I, N) -> (P,)."""
        mean = np.abs(self.losses(self.values(states)).mean(axis=1))
        fitness: Floats = mean ** (1.0 / self.power)
        return fitness

    def cluster_sizes(self, states: Ints) -> Ints:
        """Return the number of nodes up to the last used one: (P, I, N) -> (P,)."""
        numbers = np.arange(1, self.shape[1] + 1)
        sizes: Ints = np.where(states.any(axis=1), numbers, 0).max(axis=1)
        return sizes

    def num_changed(self, states: Ints) -> Ints:
        """Return how many jobs' allocations differ from the current ones: (P, I, N) -> (P,)."""
        changed = self.cluster.per_job((states != self.cluster.base).any(axis=2))
        count: Ints = np.count_nonzero(changed, axis=1)
        return count


class _SpeedupTable:
    """Speedups of one row, computed once each: a speedup function may be slow."""

    def __init__(self, shape: ReplicaShape) -> None:
        self._shape = shape
        self._levels: dict[int, _LevelTable] = {}

    def __call__(self, num_nodes: Ints, num_replicas: Ints, level: Ints) -> Floats:
        highest = int(level.max(initial=1))
        if highest == 1:
            return self._at(1)(num_nodes, num_replicas)
        found: Floats = np.zeros(num_nodes.shape)
        for one in range(1, highest + 1):
            here = level == one
            found[here] = self._at(one)(num_nodes[here], num_replicas[here])
        return found

    def _at(self, level: int) -> _LevelTable:
        if level not in self._levels:
            self._levels[level] = _LevelTable(self._shape.speedup_at(level))
        return self._levels[level]


class _LevelTable:
    """Those of one network level."""

    def __init__(self, function: SpeedupCallable) -> None:
        self._function = function
        self._table = np.zeros((1, 1))

    def __call__(self, num_nodes: Ints, num_replicas: Ints) -> Floats:
        self._extend(int(num_nodes.max(initial=0)), int(num_replicas.max(initial=0)))
        values: Floats = self._table[num_nodes, num_replicas]
        missing = np.isnan(values)
        if missing.any():
            self._ask(np.unique(np.stack([num_nodes[missing], num_replicas[missing]]), axis=1))
            values = self._table[num_nodes, num_replicas]
        return values

    def _extend(self, num_nodes: int, num_replicas: int) -> None:
        rows, columns = self._table.shape
        if num_nodes < rows and num_replicas < columns:
            return
        table = np.full((max(rows, num_nodes + 1), max(columns, num_replicas + 1)), np.nan)
        table[:rows, :columns] = self._table
        self._table = table

    def _ask(self, pairs: Ints) -> None:
        answers = np.asarray(self._function(pairs[0], pairs[1]), dtype=float)
        answers = np.broadcast_to(answers, pairs.shape[1:])
        # NaN speedups count as 0.
        self._table[pairs[0], pairs[1]] = np.nan_to_num(np.maximum(answers, 0.0), posinf=0.0)
