"""The allocations of a cluster, by name, while jobs are placed one after another.

Enforces every rule of `rules` about nodes. A pinned job may share its nodes with another
distributed job that is already there, but no new one is placed beside it: otherwise the result
would depend on when exactly a job has started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipollux_policies.allocations.allocation import (
    Allocation,
    as_allocation,
    is_first_choice,
    shape_of,
)
from pipollux_policies.allocations.change_cost import possible_survivors
from pipollux_policies.allocations.order import by_arrival, by_safety
from pipollux_policies.allocations.rules import Allocations, Jobs, Nodes, is_pinned, usable_nodes
from pipollux_policies.jobs.job_info import ReplicaShape
from pipollux_policies.jobs.topology import build_topology

from .node_choice import (
    Bools,
    Ints,
    NodeCapacity,
    NodeCounts,
    amounts,
    find_keeping,
    find_nodes,
)


@dataclass(frozen=True)
class ReplicaRequest:
    """A number of replicas of one job, and the nodes and shapes to choose from.

    >>> shape = ReplicaShape(2, {"slots": 2}, lambda nodes, replicas: replicas)
    >>> ReplicaRequest((shape,), 4, max_nodes=2).num_replicas
    4
    """

    shapes: tuple[ReplicaShape, ...]
    """The acceptable shapes, best first; all replicas have the same one."""
    num_replicas: int
    within: frozenset[Any] | None = None
    """None: all nodes are acceptable."""
    max_nodes: int | None = None
    max_level: int | None = None
    """The highest network level at which its nodes may meet."""
    stay: Allocation | None = None
    """The only acceptable allocation; the other fields are then ignored."""


class ClusterState:
    """The nodes, their free resources, and the allocations of jobs.

    A new state contains the pinned jobs, on all nodes. `base_allocations` are those that jobs may
    keep, `running` those in which they run, if they differ; survivors of a change belong to these.

    >>> from pipollux_policies import JobInfo, NodeInfo
    >>> job = JobInfo({"slots": 2}, lambda nodes, replicas: replicas, 0.0, 1, 4)
    >>> state = ClusterState({"job": job}, {"node": NodeInfo({"slots": 4})}, {})
    >>> state.find("job", ReplicaRequest(job.all_shapes, 2))
    ['node', 'node']
    """

    def __init__(
        self,
        jobs: Jobs,
        nodes: Nodes,
        base_allocations: Allocations,
        running: Allocations | None = None,
    ) -> None:
        self._running = base_allocations if running is None else running
        self._jobs, self._nodes, self._base = jobs, nodes, base_allocations
        self._names = by_safety(nodes)
        self._index = {name: number for number, name in enumerate(self._names)}
        shapes = [shape for job in jobs.values() for shape in job.all_shapes]
        self._kinds = sorted({kind for shape in shapes for kind in shape.resources})
        infos = [nodes[name] for name in self._names]
        self._topology = build_topology(infos)
        self._capacity = NodeCapacity(amounts(infos, self._kinds), self._topology)
        usable = usable_nodes(nodes)
        self._usable: Bools = np.array([name in usable for name in self._names], dtype=bool)
        self._spot: Bools = np.array([info.preemptible for info in infos], dtype=bool)
        self._gpu_types = np.array([info.gpu_type for info in infos], dtype=object)
        self._num_movable: Ints = np.zeros(len(infos), dtype=np.int64)
        self._masks: dict[frozenset[Any], Bools] = {}
        self.allocations: dict[Any, Allocation] = {}
        self.pinned = {
            name
            for name, job in jobs.items()
            if is_pinned(job, base_allocations.get(name, ()), nodes)
        }
        for name in by_arrival({name: jobs[name] for name in self.pinned}):
            self.put(name, as_allocation(jobs[name], base_allocations[name], nodes))

    def keep_running(self, wanted: Callable[[Any, Allocation], bool] | None = None) -> None:
        """Keep running jobs on their nodes, if `wanted` (None: all), unless that breaks a rule."""
        for name in by_arrival(self._jobs):
            if name in self.allocations or not self._base.get(name):
                continue
            allocation = as_allocation(self._jobs[name], self._base[name], self._nodes)
            if self.fits(name, allocation) and (wanted is None or wanted(name, allocation)):
                self.put(name, allocation)

    def counts(self, name: Any, shape: ReplicaShape, within: frozenset[Any] | None = None) -> Ints:
        """Return how many replicas of a job fit on each node: (N,)."""
        job = self._jobs[name]
        allowed = np.array([is_first_choice(job, shape, t) for t in self._gpu_types], bool)
        if within is not None:
            allowed &= self._mask(within)
        return self._capacity.counts(self._need(shape), allowed & self._usable)

    def lowest_levels(self, counts: Ints, replicas: Ints) -> Ints:
        """Return the lowest network level with room for numbers of replicas, (C,), by how many fit
        on each node.
        """
        rooms = self._topology.largest_rooms(counts)[:-1]
        levels: Ints = 1 + (rooms < replicas[:, None]).sum(axis=1)
        return levels

    def _need(self, shape: ReplicaShape) -> Ints:
        need: Ints = amounts([shape], self._kinds)[0]
        return need

    def _mask(self, within: frozenset[Any]) -> Bools:
        if within not in self._masks:
            self._masks[within] = np.array([name in within for name in self._names], dtype=bool)
        return self._masks[within]

    def budget(self) -> Budget:
        """Return the total free resources of the usable nodes, by type of GPU."""
        types = sorted(set(self._gpu_types[self._usable]))
        return Budget({t: self._total(self._usable & (self._gpu_types == t)) for t in types})

    def free_on(self, within: frozenset[Any]) -> dict[str, int]:
        """Return the total free resources of those of these nodes that are usable."""
        return self._total(self._usable & self._mask(within))

    def num_without_distributed(self, within: frozenset[Any]) -> int:
        """Return how many of these nodes are usable and carry no distributed job."""
        without = self._capacity.num_distributed == 0
        return int((self._usable & self._mask(within) & without).sum())

    def _total(self, mask: Bools) -> dict[str, int]:
        free = np.maximum(self._capacity.free[mask], 0).sum(axis=0)
        return dict(zip(self._kinds, free.tolist(), strict=True))

    def fits(self, name: Any, allocation: Allocation) -> bool:
        """Return whether this allocation fits a job that holds nothing."""
        job, shape = self._jobs[name], allocation.shape
        if shape is None:
            return False
        if not job.least_replicas <= len(allocation) <= job.most_replicas(shape):
            return False
        counts = Counter(allocation)
        if any(node not in self._index for node in counts):
            return False
        numbers = [self._index[node] for node in counts]
        allowed = self._usable
        if shape.gpu_type is not None:
            allowed = allowed & (self._gpu_types == shape.gpu_type)
        room = self._capacity.counts(self._need(shape), allowed)[numbers]
        if (room < list(counts.values())).any():
            return False
        return len(numbers) == 1 or not self._num_movable[numbers].any()

    def put(self, name: Any, allocation: Allocation) -> None:
        """Give an allocation that fits to a job that holds nothing."""
        self._change(name, allocation, 1)
        self.allocations[name] = allocation

    def take(self, name: Any) -> Allocation:
        """Remove a job's allocation and return it."""
        allocation = self.allocations.pop(name)
        self._change(name, allocation, -1)
        return allocation

    def _change(self, name: Any, allocation: Allocation, sign: int) -> None:
        placed = tuple((self._index[node], count) for node, count in Counter(allocation).items())
        need = self._need(allocation.shape) if allocation.shape else np.zeros(len(self._kinds), int)
        (self._capacity.put if sign > 0 else self._capacity.take)(placed, need)
        if len(placed) > 1:
            self._num_movable[[node for node, _ in placed]] += sign * (name not in self.pinned)

    def find(self, name: Any, request: ReplicaRequest) -> Allocation | None:
        """Find nodes for a job that holds nothing (`find_nodes`), preemptible nodes last.

        Replicas of a resizable job stay in place if that needs no more nodes, no more preemptible
        ones, and no higher network level. None only if the request cannot be met: freeing room
        never makes that harder.
        """
        if request.stay is not None:
            return request.stay if self.fits(name, request.stay) else None
        for shape in request.shapes:
            counts = self.counts(name, shape, request.within)
            closed = self._capacity.num_distributed > 0
            found = find_nodes(
                *(counts, closed, request.num_replicas),
                avoided=self._spot,
                max_nodes=request.max_nodes,
                topology=self._topology,
            )
            if found is not None and not self._is_above(found, request.max_level):
                stays = self._survivors(name, shape)
                if stays is not None:
                    keeping = find_keeping(counts, closed, request.num_replicas, stays)
                    found = self._nearer(found, keeping)
                return Allocation(
                    (self._names[n] for n, count in found for _ in range(count)),
                    shape,
                    self._topology.level(n for n, _ in found),
                )
        return None

    def _is_above(self, found: NodeCounts, max_level: int | None) -> bool:
        return max_level is not None and self._topology.level(n for n, _ in found) > max_level

    def _survivors(self, name: Any, shape: ReplicaShape) -> Ints | None:
        """Return how many replicas of a shape could survive on each node, (N,); None: none."""
        job, held = self._jobs[name], self._running.get(name, ())
        possible = possible_survivors(job, held, self._nodes)
        if not possible or shape_of(job, held, self._nodes) is not shape:
            return None
        return np.array([possible[node] for node in self._names], dtype=np.int64)

    def _nearer(self, found: NodeCounts, keeping: NodeCounts | None) -> NodeCounts:
        """Return the nodes that keep replicas in place if they are no worse than the found ones."""

        def cost(nodes: NodeCounts) -> tuple[int, int, int]:
            level = self._topology.level(node for node, _ in nodes)
            return len(nodes), sum(bool(self._spot[node]) for node, _ in nodes), level

        if keeping is None or any(
            more > than for more, than in zip(cost(keeping), cost(found), strict=True)
        ):
            return found
        return keeping


class Budget:
    """The total resources of a cluster by type of GPU, as if each type were one node."""

    def __init__(self, free: Mapping[str, Mapping[str, int]]) -> None:
        self._free = {gpu_type: dict(amounts) for gpu_type, amounts in free.items()}

    def spend(self, shape: ReplicaShape, num_replicas: int) -> bool:
        """Subtract the resources of replicas if enough are left; return whether there were."""
        needs = {kind: amount * num_replicas for kind, amount in shape.resources.items() if amount}
        types = list(self._free) if shape.gpu_type is None else [shape.gpu_type]
        rests = [self._free[gpu_type] for gpu_type in types if gpu_type in self._free]
        if any(sum(rest.get(kind, 0) for rest in rests) < need for kind, need in needs.items()):
            return False
        for kind, need in needs.items():
            for rest in sorted(rests, key=lambda rest: -rest.get(kind, 0)):
                paid = min(need, rest.get(kind, 0))
                rest[kind] = rest.get(kind, 0) - paid
                need -= paid
        return True
