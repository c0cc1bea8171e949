"""The allocation problem of Pollux (OSDI'21, §4.2), with replicas that are never split.

Symbols: J jobs, N nodes (the real ones first, then template nodes that could be rented), T kinds of
resources. A state s is an integer array of shape (J, N): s[j, n] replicas of job j on node n. It is
feasible when

    Σ_j s[j, n] · need[j, t] ≤ capacity[n, t]             a replica lies on one node, whole
    s[j] = 0  or  min_j ≤ Σ_n s[j, n] ≤ max_j
    s[j] = base[j]                                       for every pinned job j
    at most one distributed job (more than one node) on any node, pinned jobs not counted

and it is judged by two objectives, both minimised: minus the fitness, and the cluster size.

    fitness = (1/J · Σ_j max(v_j, floor)^p)^(1/p)         p = −1: the harmonic mean
    v_j     = speedup_j(nodes, replicas) / speedup_j(fair share) · restart_j
    restart = max(age − restarts · cost, 0) / (age + cost)   if a running job is changed, else 1

The fair share of a job is what it could hold of 1/J of the real cluster, rounded up. The floor
keeps the mean defined where a job holds nothing: such a job counts as one that makes `FLOOR` of its
fair share's progress, so starting it is worth more than anything that growing another can gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .job_info import JobInfo, NodeInfo

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]

FLOOR = 0.01
"""The least value of a job in the power mean."""
TOLERANCE = 1e-9
"""Two fitnesses closer than this, relatively, are as good as each other."""


def restart_factor(job: JobInfo) -> float:
    """Return what is left of a job's speedup if its allocation is changed now, in [0, 1].

    The share of its life so far that the job would have trained had it restarted once more at the
    rate that it restarted until now; a young or often restarted job is thereby left alone.
    """
    total = job.age + job.restart_seconds
    lost = job.num_restarts * job.restart_seconds
    return max(job.age - lost, 0.0) / total if total > 0 else 1.0


@dataclass(frozen=True)
class Cluster:
    """Jobs and nodes as arrays, in the order that all states share."""

    job_names: Sequence[str]
    jobs: Sequence[JobInfo]
    node_names: Sequence[str]
    """The real nodes only."""
    needs: Ints
    """(J, T): what one replica holds."""
    capacity: Ints
    """(N, T): what a node has; real nodes first, then templates."""
    base: Ints
    """(J, N): the current allocations."""
    pinned: Bools
    """(J,): allocated and not preemptible."""
    broken: Bools
    """(J,): runs on a node that is gone, so it has to be restarted whatever is decided."""

    @property
    def num_real(self) -> int:
        """Number of real nodes."""
        return len(self.node_names)


def build_cluster(
    jobs: Mapping[str, JobInfo],
    nodes: Mapping[str, NodeInfo],
    base_allocations: Mapping[str, Sequence[str]],
    template: NodeInfo,
    num_templates: int,
) -> Cluster:
    """Bring jobs and nodes into a fixed order, whatever the order of the mappings.

    Nodes that may be taken away come last. Pinned jobs come first, then those with the lowest
    `min_replicas`, then the oldest.
    """
    node_names = sorted(nodes, key=lambda name: (nodes[name].preemptible, str(name)))
    index = {name: number for number, name in enumerate(node_names)}
    whole = {name: set(base_allocations.get(name, ())) <= index.keys() for name in jobs}

    def pins(name: str) -> bool:
        # A job that lost a node has to move, pinned or not.
        return not jobs[name].preemptible and bool(base_allocations.get(name)) and whole[name]

    job_names = sorted(
        jobs, key=lambda n: (not pins(n), jobs[n].min_replicas, jobs[n].created, str(n))
    )
    infos = [nodes[name] for name in node_names] + [template] * num_templates
    kinds = sorted({kind for job in jobs.values() for kind in job.resources})
    base = np.zeros((len(jobs), len(infos)), dtype=np.int64)
    for j, name in enumerate(job_names):
        for node in base_allocations.get(name, ()):
            if node in index:
                base[j, index[node]] += 1
    return Cluster(
        job_names=job_names,
        jobs=[jobs[name] for name in job_names],
        node_names=node_names,
        needs=_amounts([jobs[name] for name in job_names], kinds),
        capacity=_amounts(infos, kinds),
        base=base,
        pinned=np.array([pins(name) for name in job_names], dtype=bool),
        broken=np.array([not whole[name] for name in job_names], dtype=bool),
    )


def _amounts(infos: Sequence[JobInfo | NodeInfo], kinds: Sequence[str]) -> Ints:
    rows = [[info.resources.get(kind, 0) for kind in kinds] for info in infos]
    return np.array(rows, dtype=np.int64).reshape(len(infos), len(kinds))


def room(needs: Ints, free: Ints) -> Ints:
    """Return how many replicas fit: needs (T,), free (..., T) -> (...,)."""
    asked = needs > 0
    counts: Ints = (free[..., asked] // needs[asked]).min(axis=-1)
    return np.maximum(counts, 0)


class AllocationProblem:
    """Judges states of one `Cluster`; see the module's text for every symbol.

    Args:
        cluster: jobs and nodes.
        power: p of the power mean; −1 is the paper's.
    """

    def __init__(self, cluster: Cluster, power: float = -1.0) -> None:
        self.cluster = cluster
        self.power = power
        self.shape = cluster.base.shape
        jobs = cluster.jobs
        taken = np.einsum("jn,jt->nt", cluster.base[cluster.pinned], cluster.needs[cluster.pinned])
        self.free: Ints = np.maximum(cluster.capacity - taken, 0)
        """(N, T): what pinned jobs leave."""
        self.fits: Ints = np.stack([room(need, self.free) for need in cluster.needs])
        """(J, N): replicas of a job on a node that holds nothing else but pinned jobs."""
        self.min_replicas: Ints = np.array([max(job.min_replicas, 1) for job in jobs])
        most = np.array([job.max_replicas for job in jobs])
        self.max_replicas: Ints = np.minimum(most, self.fits.sum(axis=1))
        """(J,): not more than fit; may be below `min_replicas`, and then the job gets nothing."""
        self.factors: Floats = np.array([restart_factor(job) for job in jobs])
        self.running: Bools = cluster.base.any(axis=1) | cluster.broken
        self._speedups = [_SpeedupTable(job) for job in jobs]
        self.shares: Floats = self._dominant_shares()
        """(J,): the largest share of any resource of the real nodes that one replica holds."""
        self.fair: Floats = self._fair_speedups()
        """(J,): speedup on the fair share."""

    def _dominant_shares(self) -> Floats:
        total = self.cluster.capacity[: self.cluster.num_real].sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(self.cluster.needs > 0, self.cluster.needs / total, 0.0)
        dominant: Floats = shares.max(axis=1)
        return dominant

    def _fair_speedups(self) -> Floats:
        fair = np.ones(len(self.cluster.jobs))
        for j, job in enumerate(self.cluster.jobs):
            per_node = max(int(room(self.cluster.needs[j], self.cluster.capacity).max()), 1)
            share = np.ceil(1.0 / (self.shares[j] * len(fair)) - TOLERANCE)
            replicas = int(np.clip(share, self.min_replicas[j], job.max_replicas))
            nodes = -(-replicas // per_node)
            value = self.speedup(j, np.array([nodes]), np.array([replicas]))[0]
            fair[j] = value if value > 0 else 1.0
        return fair

    def speedup(self, job: int, num_nodes: Ints, num_replicas: Ints) -> Floats:
        """Return a job's speedup over one replica; (P,), (P,) -> (P,)."""
        return self._speedups[job](num_nodes, num_replicas)

    def job_values(self, job: int, rows: Ints) -> Floats:
        """Return v_j of rows of one job: (P, N) -> (P,)."""
        speedups = self.speedup(job, np.count_nonzero(rows, axis=1), rows.sum(axis=1))
        values: Floats = speedups / self.fair[job]
        if not self.running[job]:
            return values
        changed = self.cluster.broken[job] | (rows != self.cluster.base[job]).any(axis=1)
        values[changed] *= self.factors[job]
        return values

    def losses(self, values: Floats) -> Floats:
        """Return what each job adds to a sum that is least where the power mean is greatest."""
        terms: Floats = -np.sign(self.power) * np.maximum(values, FLOOR) ** self.power
        return terms

    def values(self, states: Ints) -> Floats:
        """Return v: (P, J, N) -> (P, J)."""
        columns = [self.job_values(j, states[:, j]) for j in range(self.shape[0])]
        return np.stack(columns, axis=1)

    def fitness(self, states: Ints) -> Floats:
        """Return the power mean: (P, J, N) -> (P,)."""
        mean = np.abs(self.losses(self.values(states)).mean(axis=1))
        fitness: Floats = mean ** (1.0 / self.power)
        return fitness

    def cluster_sizes(self, states: Ints) -> Ints:
        """Return the number of nodes up to the last that is used: (P, J, N) -> (P,)."""
        numbers = np.arange(1, self.shape[1] + 1)
        sizes: Ints = np.where(states.any(axis=1), numbers, 0).max(axis=1)
        return sizes

    def num_changed(self, states: Ints) -> Ints:
        """Return how many jobs' allocations differ from the current ones: (P, J, N) -> (P,)."""
        changed: Ints = np.count_nonzero((states != self.cluster.base).any(axis=2), axis=1)
        return changed

    def utilities(self, states: Ints) -> Floats:
        """Return the cluster's utility, in [0, 1]: (P, J, N) -> (P,).

        Speedup per replica, weighted by the share of the nodes in use that the job holds, of the
        resource for which that is largest (the paper's §4.2.2, used for autoscaling).
        """
        used = states.any(axis=1)
        total = np.einsum("pn,nt->pt", used, self.cluster.capacity)
        replicas = states.sum(axis=2)
        held = replicas[:, :, None] * self.cluster.needs
        shares = held / np.maximum(total, 1)[:, None, :]
        speedups = np.stack(
            [
                self.speedup(j, np.count_nonzero(states[:, j], axis=1), replicas[:, j])
                for j in range(self.shape[0])
            ],
            axis=1,
        )
        ideal = speedups / np.maximum(replicas, 1)
        utilities: Floats = (ideal[:, :, None] * shares).sum(axis=1).max(axis=1)
        return utilities


class _SpeedupTable:
    """Speedups of one job, asked for once each: a speedup function may be slow."""

    def __init__(self, job: JobInfo) -> None:
        self._function = job.speedup_fn
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
        # A speedup that is not a number is no reason to give a job anything.
        self._table[pairs[0], pairs[1]] = np.nan_to_num(np.maximum(answers, 0.0), posinf=0.0)
