"""Jobs and nodes as arrays, in an order that does not depend on the mappings.

Each (job, shape) is a *row*: a state of the search has the replicas per node of each row, and at
most one row of a job is not empty. Nodes that are gone, not healthy or draining have no column:
they accept no new replicas, and pinned jobs keep their replicas there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipollux_policies.allocations.allocation import (
    is_first_choice,
    network_level,
    runs_as,
    shape_of,
)
from pipollux_policies.allocations.change_cost import possible_survivors
from pipollux_policies.allocations.order import by_safety, name_order
from pipollux_policies.allocations.rules import Allocations, is_pinned, must_move, usable_nodes
from pipollux_policies.jobs.job_info import JobInfo, NodeInfo, ReplicaShape
from pipollux_policies.jobs.topology import Topology, build_topology
from pipollux_policies.placement.node_choice import Bools, Ints, amounts


@dataclass(frozen=True)
class ClusterArrays:
    """J jobs in I rows, N nodes (real ones first, then templates), T kinds of resources."""

    job_names: Sequence[Any]
    jobs: Sequence[JobInfo]
    node_names: Sequence[Any]
    """Names of the real nodes only."""
    job_of: Ints
    """(I,): the job of each row; the rows of a job are adjacent, its own shape first."""
    shapes: Sequence[ReplicaShape]
    needs: Ints
    """(I, T): the resources of one replica."""
    capacity: Ints
    """(N, T): the resources of a node."""
    allowed: Bools
    base: Ints
    """(I, N): the current allocations, on nodes that have a column."""
    base_rows: Ints
    """(J,): the current row of each job; its first row if it holds nothing."""
    extents: Ints
    """(J, 3): current numbers of nodes and replicas of each job, on all nodes, and their level."""
    topology: Topology
    """Network levels of the N nodes; nodes that could be rented share no domain."""
    pinned: Bools
    broken: Bools
    """(I,): rows of jobs that cannot stay as they are."""
    elastic: Bools
    """(I,): current rows whose replicas in `base` can survive a change."""

    @property
    def num_real(self) -> int:
        """Number of real nodes."""
        return len(self.node_names)

    @property
    def num_jobs(self) -> int:
        """J."""
        return len(self.jobs)

    @cached_property
    def first_rows(self) -> Ints:
        """(J,): the first row of each job."""
        first: Ints = np.searchsorted(self.job_of, np.arange(self.num_jobs))
        return first

    @cached_property
    def spans(self) -> list[range]:
        """(J,): the rows of each job."""
        stops = [*self.first_rows[1:].tolist(), len(self.job_of)]
        return [range(*pair) for pair in zip(self.first_rows.tolist(), stops, strict=True)]

    @cached_property
    def movable_jobs(self) -> Ints:
        """The indices of jobs that are not pinned."""
        movable: Ints = np.flatnonzero(~self.pinned[self.first_rows])
        return movable

    def per_job(self, flags: Bools) -> Bools:
        """Return which jobs have a flagged row: (..., I) -> (..., J)."""
        merged: Bools = np.logical_or.reduceat(flags, self.first_rows, axis=-1)
        return merged

    def held_row(self, job: int, state: Ints) -> int:
        """Return the non-empty row of a job in a state (I, N), or its first row."""
        held = (row for row in self.spans[job] if state[row].any())
        return next(held, self.spans[job][0])


def build_cluster(
    jobs: Mapping[Any, JobInfo],
    nodes: Mapping[Any, NodeInfo],
    base_allocations: Allocations,
    template: NodeInfo,
    num_templates: int,
) -> ClusterArrays:
    """Return jobs and nodes as arrays, in an order that does not depend on the mappings.
    Preemptible nodes come last; pinned jobs first, then by `min_replicas`, then the oldest.
    """
    base_of = {name: base_allocations.get(name, ()) for name in jobs}
    pins = {name: is_pinned(job, base_of[name], nodes) for name, job in jobs.items()}
    node_names = by_safety(usable_nodes(nodes))
    job_names = sorted(
        jobs,
        key=lambda n: (not pins[n], jobs[n].min_replicas, jobs[n].created, name_order(n)),
    )
    infos = [nodes[name] for name in node_names] + [template] * num_templates
    rows = [(j, shape) for j, name in enumerate(job_names) for shape in jobs[name].all_shapes]
    shapes = [shape for _, shape in rows]
    kinds = sorted({kind for shape in shapes for kind in shape.resources})
    extents = [
        (len(set(base_of[name])), len(base_of[name]), network_level(base_of[name], nodes))
        for name in job_names
    ]
    cluster = ClusterArrays(
        job_names=job_names,
        jobs=[jobs[name] for name in job_names],
        node_names=node_names,
        job_of=np.array([j for j, _ in rows], dtype=np.int64),
        shapes=shapes,
        needs=amounts(shapes, kinds),
        capacity=amounts(infos, kinds),
        allowed=np.concatenate([_allowed(jobs[name], infos) for name in job_names]),
        base=np.zeros((len(rows), len(infos)), dtype=np.int64),
        base_rows=np.zeros(len(job_names), dtype=np.int64),
        extents=np.array(extents, dtype=np.int64).reshape(-1, 3),
        topology=build_topology(infos),
        pinned=np.array([pins[job_names[j]] for j, _ in rows], dtype=bool),
        broken=np.zeros(len(rows), dtype=bool),
        elastic=np.zeros(len(rows), dtype=bool),
    )
    for j, name in enumerate(job_names):
        _set_base(cluster, j, base_of[name], nodes)
    return cluster


def _allowed(job: JobInfo, nodes: Sequence[NodeInfo]) -> Bools:
    rows = [[is_first_choice(job, s, node.gpu_type) for node in nodes] for s in job.all_shapes]
    return np.array(rows, dtype=bool)


def _set_base(
    cluster: ClusterArrays, job: int, allocation: Sequence[Any], nodes: Mapping[Any, NodeInfo]
) -> None:
    info, span = cluster.jobs[job], cluster.spans[job]
    shape = shape_of(info, allocation, nodes)
    row = next(i for i in span if cluster.shapes[i] is shape)
    cluster.base_rows[job] = row
    index = {name: number for number, name in enumerate(cluster.node_names)}
    for node in allocation:
        if node in index:
            cluster.base[row, index[node]] += 1
    cluster.elastic[row] = bool(possible_survivors(info, allocation, nodes))
    unknown = not runs_as(allocation, shape)
    wrong = not all(shape.runs_on(nodes[node]) for node in allocation if node in nodes)
    if not cluster.pinned[row]:
        cluster.broken[span] = must_move(info, allocation, nodes) or unknown or wrong
