"""The nodes as arrays, and their capacity for each kind of replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipollux_policies.allocations.allocation import shape_of
from pipollux_policies.allocations.order import by_safety
from pipollux_policies.allocations.rules import usable_nodes
from pipollux_policies.jobs.job_info import JobInfo, NodeInfo, ReplicaShape
from pipollux_policies.jobs.topology import FLAT, Topology, build_topology
from pipollux_policies.placement.node_choice import Bools, Ints, amounts, frozen, num_fitting


@dataclass(frozen=True)
class Nodes:
    """N usable nodes with T kinds of resources, by `by_safety`: preemptible nodes come last."""

    names: Sequence[Any]
    gpu_types: NDArray[np.str_]
    kinds: Sequence[str]
    """Names of the T resources."""
    capacity: Ints
    """(N, T): all resources of the nodes."""
    free: Ints
    """(N, T): the resources that pinned jobs leave."""
    template: NodeInfo
    """A node that could be rented; only its resources count."""
    closed: Bools
    """(N,): nodes that accept no new jobs; their current jobs may stay."""
    topology: Topology = FLAT
    _kept: dict[tuple[str, Any], Any] = field(default_factory=dict)
    """Cached results of the methods below, by method and kind of replica."""

    def need(self, shape: ReplicaShape) -> Ints:
        """Return the resources of one replica of a shape, (T,)."""
        need: Ints = self._keep("need", shape, self._need)
        return need

    def allowed(self, shape: ReplicaShape) -> Bools:
        """Return the nodes that may hold a replica of a shape, (N,)."""
        allowed: Bools = self._keep("allowed", shape, self._allowed)
        return allowed

    def wanted(self, shape: ReplicaShape) -> tuple[Ints, Bools]:
        """Return `need` and `allowed`."""
        return self.need(shape), self.allowed(shape)

    def of_type(self, shape: ReplicaShape) -> Bools:
        """Return the nodes whose GPUs fit a shape, (N,)."""
        of_type: Bools = self._keep("of_type", shape, self._of_type)
        return of_type

    def reach(self, shape: ReplicaShape) -> Ints:
        """Return how many replicas of a shape the roomiest 1, 2, … nodes hold, (N,)."""
        reach: Ints = self._keep("reach", shape, self._reach)
        return reach

    def sizes(self, shape: ReplicaShape, job: JobInfo) -> tuple[Ints, Ints]:
        """Return the possible numbers of nodes (the fewest) and of replicas of a job, (C,)."""
        reach = self.reach(shape)
        least = job.least_replicas
        most = min(job.most_replicas(shape), int(reach[-1]) if reach.size else 0)
        key = "sizes", (least, most, shape.holds)
        if key not in self._kept:
            replicas = np.arange(least, most + 1)
            self._kept[key] = np.searchsorted(reach, replicas) + 1, replicas
        found: tuple[Ints, Ints] = self._kept[key]
        return found

    def sizes_by_level(self, shape: ReplicaShape, job: JobInfo) -> list[tuple[Ints, Ints, int]]:
        """Return `sizes` in parts, each with the lowest network level at which its replicas fit; 1
        on one node. Levels that cost a shape the same are one part, with the highest of them.
        """
        steps = shape.steps(self.topology.num_levels)
        key = "parts", (job.least_replicas, job.most_replicas(shape), steps, shape.holds)
        if key not in self._kept:
            self._kept[key] = self._parts(shape, *self.sizes(shape, job), steps)
        found: list[tuple[Ints, Ints, int]] = self._kept[key]
        return found

    def _parts(
        self, shape: ReplicaShape, nodes: Ints, replicas: Ints, steps: Sequence[int]
    ) -> list[tuple[Ints, Ints, int]]:
        top = self.topology.num_levels
        if not steps:
            return [(nodes, replicas, top)]
        rooms: Ints = self._keep("rooms", shape, self._rooms)
        # The last size of each level; on one node every level costs the same.
        on_one = int(np.searchsorted(nodes, 1, side="right"))
        ends = [max(int(np.searchsorted(replicas, rooms[x - 1], "right")), on_one) for x in steps]
        parts = zip([0, *ends], [*ends, len(nodes)], [*steps, top], strict=True)
        return [
            (nodes[begin:end], replicas[begin:end], level)
            for begin, end, level in parts
            if begin < end
        ]

    def lone_speedup(self, shape: ReplicaShape, replicas: int) -> float:
        """Return the speedup of replicas on the fewest nodes of an empty cluster."""
        per_node = self.per_node(shape)
        rooms: Ints = self._keep("lone rooms", shape, self._lone_rooms)
        level = 1 + int(np.count_nonzero(rooms[:-1] < replicas))
        return float(shape.speedup_at(level)(-(-replicas // per_node), replicas))

    def per_node(self, shape: ReplicaShape) -> int:
        """Return how many replicas of a shape the largest node holds, rented nodes included."""
        per_node: int = self._keep("per_node", shape, self._per_node)
        return per_node

    def share(self, shape: ReplicaShape) -> float:
        """Return the largest share of any resource of its possible nodes that one replica needs."""
        share: float = self._keep("share", shape, self._share)
        return share

    def _keep(self, what: str, shape: ReplicaShape, find: Callable[[ReplicaShape], Any]) -> Any:
        key = what, shape.holds
        if key not in self._kept:
            self._kept[key] = find(shape)
        return self._kept[key]

    def _need(self, shape: ReplicaShape) -> Ints:
        return frozen(amounts([shape], self.kinds)[0])

    def _allowed(self, shape: ReplicaShape) -> Bools:
        return frozen(self.of_type(shape) & ~self.closed)

    def _of_type(self, shape: ReplicaShape) -> Bools:
        if shape.gpu_type is None:
            return np.ones(len(self.names), dtype=bool)
        of_type: Bools = self.gpu_types == shape.gpu_type
        return of_type

    def _reach(self, shape: ReplicaShape) -> Ints:
        fits = np.where(self.allowed(shape), num_fitting(self.need(shape), self.free), 0)
        return np.cumsum(np.sort(fits)[::-1])

    def _rooms(self, shape: ReplicaShape) -> Ints:
        fits = np.where(self.allowed(shape), num_fitting(self.need(shape), self.free), 0)
        return self.topology.largest_rooms(fits)

    def _lone_rooms(self, shape: ReplicaShape) -> Ints:
        fits = np.where(self.of_type(shape), num_fitting(self.need(shape), self.capacity), 0)
        return self.topology.largest_rooms(fits)

    def _per_node(self, shape: ReplicaShape) -> int:
        fits = np.where(self.of_type(shape), num_fitting(self.need(shape), self.capacity), 0)
        return max(int(fits.max(initial=0)), self.template.num_fitting(shape))

    def _share(self, shape: ReplicaShape) -> float:
        need, total = self.need(shape), self.capacity[self.of_type(shape)].sum(axis=0)
        # If no node has a resource, a replica needs all of it.
        shares = np.where(total > 0, need / np.maximum(total, 1), 1.0)
        return float(shares[need > 0].max(initial=0.0))


def build_nodes(
    jobs: Mapping[Any, JobInfo],
    nodes: Mapping[Any, NodeInfo],
    pinned: Mapping[Any, Sequence[Any]],
    template: NodeInfo,
) -> Nodes:
    """Return the usable nodes, without the resources of pinned jobs."""
    names = by_safety(usable_nodes(nodes))
    held = {shape.holds for job in jobs.values() for shape in job.all_shapes}
    kinds = sorted({kind for _, resources in held for kind, _ in resources})
    capacity = amounts([nodes[name] for name in names], kinds)
    types = np.array([nodes[name].gpu_type for name in names], dtype=np.str_)
    closed = np.zeros(len(names), dtype=bool)
    topology = build_topology([nodes[name] for name in names])
    places = Nodes(names, types, kinds, capacity, capacity.copy(), template, closed, topology)
    places.free[:] -= _held(places, pinned, jobs, nodes)
    np.maximum(places.free, 0, out=places.free)
    return places


def close_nodes(
    places: Nodes,
    closed: Sequence[int],
    allocations: Mapping[Any, Sequence[Any]],
    jobs: Mapping[Any, JobInfo],
    nodes: Mapping[Any, NodeInfo],
) -> None:
    """Close nodes: keep free only the resources of jobs that may stay there."""
    held = _held(places, allocations, jobs, nodes)[closed]
    places.free[closed] = np.minimum(places.free[closed], held)
    places.closed[closed] = True


def _held(
    places: Nodes,
    allocations: Mapping[Any, Sequence[Any]],
    jobs: Mapping[Any, JobInfo],
    nodes: Mapping[Any, NodeInfo],
) -> Ints:
    index = {name: number for number, name in enumerate(places.names)}
    held = np.zeros_like(places.capacity)
    for name, allocation in allocations.items():
        need = places.need(shape_of(jobs[name], allocation, nodes)) if allocation else 0
        for node in allocation:
            if node in index:
                held[index[node]] += need
    return held
