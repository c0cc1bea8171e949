"""What is left of the nodes while whole replicas are placed on them, one job after another.

Every rule of `rules` that concerns nodes is kept here: replicas lie whole on usable nodes of
the right type of GPU, nothing is overcommitted, and a node carries at most one distributed job. A
pinned job may share its nodes with another distributed one that is there already, but no new one is
put beside it: whether a job that has just started counts would else depend on when one looks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipollux_sched.policy.allocation import Allocation, shape_of
from pipollux_sched.policy.job_info import JobInfo, ReplicaShape
from pipollux_sched.policy.pollux.arrays import Bools, Ints, room
from pipollux_sched.policy.rules import Allocations, Jobs, Nodes, is_pinned, usable_nodes


def name_order(name: Any) -> tuple[str, str]:
    """Return what names of any type are sorted by, so that the order of mappings is irrelevant."""
    return str(name), type(name).__name__


def by_arrival(jobs: Jobs) -> list[Any]:
    """Return the jobs' names, the one submitted first in front."""
    return sorted(jobs, key=lambda name: (jobs[name].created, name_order(name)))


def slots_of(shape: ReplicaShape) -> int:
    """Return the slots that one replica holds, at least 1; its stages where it does not say."""
    return max(shape.resources.get("slots", shape.num_stages), 1)


def chosen_on(job: JobInfo, shape: ReplicaShape, gpu_type: str) -> bool:
    """Tell whether a job's replicas of so many stages are of this shape on a type of GPU.

    Of several shapes that have the same number of stages and run there, the first counts, as
    `shape_of` has it: an allocation says its number of stages, not which of them is meant.
    """
    for other in job.all_shapes:
        if other.num_stages == shape.num_stages and other.gpu_type in (None, gpu_type):
            return other is shape
    return False


@dataclass(frozen=True)
class ReplicaRequest:
    """So many replicas of one job, and where they may lie.

    Example:
        >>> shape = ReplicaShape(2, {"slots": 2}, lambda nodes, replicas: replicas)
        >>> ReplicaRequest((shape,), 4, max_nodes=2).num_replicas
        4
    """

    shapes: tuple[ReplicaShape, ...]
    """The shapes that will do, the best first; all replicas are of one of them."""
    num_replicas: int
    within: frozenset[Any] | None = None
    """The only nodes that will do; None: all."""
    max_nodes: int | None = None
    """More nodes than this will not do; None: any number."""
    stay: Allocation | None = None
    """The only allocation that will do; the other fields are then not looked at."""


class FreeSpace:
    """The nodes, what is free on them, and what jobs hold.

    A new one holds the pinned jobs, wherever they are.

    Args:
        jobs: all jobs, by name.
        nodes: all nodes, by name.
        base_allocations: what runs now.

    Example:
        >>> from pipollux_sched.policy import NodeInfo
        >>> job = JobInfo({"slots": 2}, lambda nodes, replicas: replicas, 0.0, 1, 4)
        >>> space = FreeSpace({"job": job}, {"node": NodeInfo({"slots": 4})}, {})
        >>> space.find("job", ReplicaRequest(job.all_shapes, 2))
        ['node', 'node']
    """

    def __init__(self, jobs: Jobs, nodes: Nodes, base_allocations: Allocations) -> None:
        self._jobs, self._nodes, self._base = jobs, nodes, base_allocations
        self._names = sorted(nodes, key=name_order)
        self._index = {name: number for number, name in enumerate(self._names)}
        shapes = [shape for job in jobs.values() for shape in job.all_shapes]
        self._kinds = sorted({kind for shape in shapes for kind in shape.resources})
        infos = [nodes[name] for name in self._names]
        amounts = [[info.resources.get(kind, 0) for kind in self._kinds] for info in infos]
        self._free: Ints = np.array(amounts, dtype=np.int64).reshape(len(infos), len(self._kinds))
        usable = usable_nodes(nodes)
        self._usable: Bools = np.array([name in usable for name in self._names], dtype=bool)
        self._spot: Bools = np.array([info.preemptible for info in infos], dtype=bool)
        self._gpu_types = np.array([info.gpu_type for info in infos], dtype=object)
        self._num_distributed: Ints = np.zeros(len(infos), dtype=np.int64)
        self._num_movable: Ints = np.zeros(len(infos), dtype=np.int64)
        self._masks: dict[frozenset[Any], Bools] = {}
        self.allocations: dict[Any, Allocation] = {}
        """What jobs hold; a job that waits is not in it."""
        self.pinned = {
            name
            for name, job in jobs.items()
            if is_pinned(job, base_allocations.get(name, ()), nodes)
        }
        """Jobs whose allocations must not be changed."""
        for name in by_arrival({name: jobs[name] for name in self.pinned}):
            self.put(name, self._as_allocation(name, base_allocations[name]))

    def keep_running(self, wanted: Callable[[Any, Allocation], bool] | None = None) -> None:
        """Let the jobs that run stay where they are, as far as that breaks no rule.

        Args:
            wanted: tells of a job's name and allocation whether it shall stay; None: all shall.
        """
        for name in by_arrival(self._jobs):
            if name in self.allocations or not self._base.get(name):
                continue
            allocation = self._as_allocation(name, self._base[name])
            if self.fits(name, allocation) and (wanted is None or wanted(name, allocation)):
                self.put(name, allocation)

    def _as_allocation(self, name: Any, nodes_of: Sequence[Any]) -> Allocation:
        return Allocation(nodes_of, shape_of(self._jobs[name], nodes_of, self._nodes))

    def rooms(self, name: Any, shape: ReplicaShape, within: frozenset[Any] | None = None) -> Ints:
        """Return how many replicas of a job fit on each node, (N,), in the order of their names."""
        allowed = np.array([chosen_on(self._jobs[name], shape, t) for t in self._gpu_types], bool)
        if within is not None:
            allowed &= self._mask(within)
        counts: Ints = np.where(allowed, self._rooms(shape), 0)
        return counts

    def _rooms(self, shape: ReplicaShape) -> Ints:
        need = np.array([shape.resources.get(kind, 0) for kind in self._kinds], dtype=np.int64)
        allowed = self._usable
        if shape.gpu_type is not None:
            allowed = allowed & (self._gpu_types == shape.gpu_type)
        counts: Ints = np.where(allowed, room(need, self._free), 0)
        return counts

    def _mask(self, within: frozenset[Any]) -> Bools:
        if within not in self._masks:
            self._masks[within] = np.array([name in within for name in self._names], dtype=bool)
        return self._masks[within]

    def budget(self) -> Budget:
        """Return what is free on usable nodes in all, by type of GPU."""
        types = sorted(set(self._gpu_types[self._usable]))
        return Budget({t: self._total(self._usable & (self._gpu_types == t)) for t in types})

    def free_on(self, within: frozenset[Any]) -> dict[str, int]:
        """Return what is free of each resource on some nodes, of those that are usable."""
        return self._total(self._usable & self._mask(within))

    def num_without_distributed(self, within: frozenset[Any]) -> int:
        """Return how many of some nodes are usable and carry no distributed job."""
        return int((self._usable & self._mask(within) & (self._num_distributed == 0)).sum())

    def _total(self, mask: Bools) -> dict[str, int]:
        amounts = np.maximum(self._free[mask], 0).sum(axis=0)
        return dict(zip(self._kinds, amounts.tolist(), strict=True))

    def fits(self, name: Any, allocation: Allocation) -> bool:
        """Tell whether a job that holds nothing may have this allocation."""
        job, shape = self._jobs[name], allocation.shape
        if shape is None or not max(job.min_replicas, 1) <= len(allocation) <= job.most_replicas(
            shape
        ):
            return False
        counts = Counter(allocation)
        if any(node not in self._index for node in counts):
            return False
        numbers = [self._index[node] for node in counts]
        rooms = self._rooms(shape)[numbers]
        if (rooms < list(counts.values())).any():
            return False
        return len(numbers) == 1 or not self._num_movable[numbers].any()

    def put(self, name: Any, allocation: Allocation) -> None:
        """Give a job that holds nothing an allocation that fits."""
        self._change(name, allocation, 1)
        self.allocations[name] = allocation

    def take(self, name: Any) -> Allocation:
        """Take from a job what it holds, and return it."""
        allocation = self.allocations.pop(name)
        self._change(name, allocation, -1)
        return allocation

    def _change(self, name: Any, allocation: Allocation, sign: int) -> None:
        resources = allocation.shape.resources if allocation.shape else {}
        need = np.array([resources.get(kind, 0) for kind in self._kinds], dtype=np.int64)
        counts = Counter(allocation)
        for node, count in counts.items():
            self._free[self._index[node]] -= sign * count * need
        if len(counts) > 1:
            numbers = [self._index[node] for node in counts]
            self._num_distributed[numbers] += sign
            self._num_movable[numbers] += sign * (name not in self.pinned)

    def find(self, name: Any, request: ReplicaRequest) -> Allocation | None:
        """Find nodes for a job that holds nothing, consolidated; None if there are none.

        One node if one has room, the tightest such, nodes that may be taken away last; else as few
        nodes as possible, none of which carries another distributed job. None is returned only if
        the request cannot be met, so that less in the way never makes it harder.
        """
        if request.stay is not None:
            return request.stay if self.fits(name, request.stay) else None
        for shape in request.shapes:
            rooms = self.rooms(name, shape, request.within)
            numbers = self._one_node(rooms, request.num_replicas)
            if numbers is None:
                numbers = self._several_nodes(rooms, request)
            if numbers is not None:
                return Allocation((self._names[number] for number in numbers), shape)
        return None

    def _one_node(self, rooms: Ints, num_replicas: int) -> list[int] | None:
        enough = np.flatnonzero(rooms >= num_replicas)
        if not len(enough):
            return None
        best = np.lexsort((enough, rooms[enough], self._spot[enough]))[0]
        return [int(enough[best])] * num_replicas

    def _several_nodes(self, rooms: Ints, request: ReplicaRequest) -> list[int] | None:
        rooms = np.where(self._num_distributed > 0, 0, rooms)
        order = np.lexsort((np.arange(len(rooms)), self._spot, -rooms))
        reach = np.cumsum(rooms[order])
        num_nodes = int(np.searchsorted(reach, request.num_replicas)) + 1
        if num_nodes > min(len(order), request.max_nodes or len(order)):
            return None
        return list(self._filled(rooms, order, num_nodes, request.num_replicas))

    def _filled(self, rooms: Ints, order: Ints, num_nodes: int, num_replicas: int) -> Iterator[int]:
        """Fill the roomiest nodes, and put the rest on the tightest node that holds it."""
        rest = num_replicas
        for number in order[: num_nodes - 1].tolist():
            yield from [number] * int(rooms[number])
            rest -= int(rooms[number])
        others = order[num_nodes - 1 :]
        enough = others[rooms[others] >= rest]
        last = np.lexsort((enough, rooms[enough], self._spot[enough]))[0]
        yield from [int(enough[last])] * rest


class Budget:
    """What a cluster has in all, as if it were one node for each type of GPU.

    Args:
        free: amounts by type of GPU, and of that by kind of resource.
    """

    def __init__(self, free: Mapping[str, Mapping[str, int]]) -> None:
        self._free = {gpu_type: dict(amounts) for gpu_type, amounts in free.items()}

    def spend(self, shape: ReplicaShape, num_replicas: int) -> bool:
        """Pay for so many replicas, if there is enough left; tell whether there was."""
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
