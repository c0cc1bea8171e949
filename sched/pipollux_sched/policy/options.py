"""What every job could get, as arrays: the choices of the exact policy.

An option is a shape and a number of replicas, on the fewest nodes that hold them. Option 0 is to
get nothing. A job that runs, and may stay, has one option more, the last: to stay as it is, on
whatever nodes it lies; every other option is a restart.

Resources are counted after what pinned jobs hold has been taken off the nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .allocation import Allocation, shape_of
from .feasibility import is_pinned, must_move, usable_nodes
from .job_info import JobInfo, NodeInfo, ReplicaShape

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Row: TypeAlias = tuple[tuple[int, int], ...]
"""(node, number of replicas) of every node that a job lies on."""

NOTHING = 0
"""The option to get nothing."""


@dataclass(frozen=True)
class JobOptions:
    """All options of one job; arrays of length C."""

    name: Any
    job: JobInfo
    shape: Ints
    """Index into `job.all_shapes`; of no meaning for `NOTHING`."""
    replicas: Ints
    num_nodes: Ints
    speedup: Floats
    """Over one replica of the job's own shape."""
    base: Row
    """Where it lies now; empty if it holds nothing, or cannot stay there."""
    runs: bool
    """Whether it held something, so that whatever it gets but `base` is a restart."""

    @property
    def stay(self) -> int | None:
        """The option to stay as it is, if there is one."""
        return len(self.replicas) - 1 if self.base else None


@dataclass(frozen=True)
class Instance:
    """An allocation problem in numbers; jobs and nodes are in an order of their own."""

    node_names: Sequence[Any]
    """Usable nodes; those that may be taken away come last."""
    free: Ints
    """(N, T): what pinned jobs leave."""
    gpu_types: Sequence[str]
    kinds: Sequence[str]
    """Names of the T resources."""
    jobs: Sequence[JobOptions]
    """Jobs that are not pinned, the oldest first."""
    pinned: Mapping[Any, Sequence[Any]]
    """Allocations that are not touched."""
    total: Ints
    """(T,): what all usable nodes have, pinned jobs' part included."""
    num_jobs: int
    """Pinned ones included."""
    _needs: dict[int, Ints] = field(default_factory=dict)

    def need(self, shape: ReplicaShape) -> Ints:
        """Return what one replica of a shape holds: (T,)."""
        known = self._needs.get(id(shape))
        if known is None:
            known = np.array([shape.resources.get(kind, 0) for kind in self.kinds], dtype=np.int64)
            self._needs[id(shape)] = known
        return known

    def runs_on(self, shape: ReplicaShape) -> Bools:
        """Tell which nodes have GPUs that a shape is for: (N,)."""
        if shape.gpu_type is None:
            return np.ones(len(self.node_names), dtype=bool)
        return np.array([kind == shape.gpu_type for kind in self.gpu_types], dtype=bool)

    def fits(self, shape: ReplicaShape) -> Ints:
        """Return how many replicas of a shape each node holds if nothing else is there: (N,)."""
        return np.where(self.runs_on(shape), room(self.need(shape), self.free), 0)


def room(need: Ints, free: Ints) -> Ints:
    """Return how many replicas fit: need (T,), free (..., T) -> (...,)."""
    asked = need > 0
    counts: Ints = (free[..., asked] // need[asked]).min(axis=-1)
    return np.maximum(counts, 0)


def build_instance(
    jobs: Mapping[Any, JobInfo],
    nodes: Mapping[Any, NodeInfo],
    base_allocations: Mapping[Any, Sequence[Any]],
) -> Instance:
    """Bring jobs and nodes into numbers, whatever the order of the mappings."""
    usable = usable_nodes(nodes)
    names = sorted(usable, key=lambda name: (usable[name].preemptible, str(name)))
    kinds = sorted({k for job in jobs.values() for s in job.all_shapes for k in s.resources})
    capacity = np.array(
        [[usable[name].resources.get(kind, 0) for kind in kinds] for name in names], dtype=np.int64
    ).reshape(len(names), len(kinds))
    index = {name: number for number, name in enumerate(names)}
    pinned = {
        name: base_allocations[name]
        for name, job in jobs.items()
        if is_pinned(job, base_allocations.get(name, ()), nodes)
    }
    instance = Instance(
        node_names=names,
        free=capacity.copy(),
        gpu_types=[usable[name].gpu_type for name in names],
        kinds=kinds,
        jobs=[],
        pinned=pinned,
        total=capacity.sum(axis=0),
        num_jobs=len(jobs),
    )
    for name, allocation in pinned.items():
        need = instance.need(shape_of(jobs[name], allocation, nodes))
        for node in allocation:
            if node in index:
                instance.free[index[node]] -= need
    np.maximum(instance.free, 0, out=instance.free)
    order = sorted(jobs.keys() - pinned.keys(), key=lambda n: (jobs[n].created, str(n)))
    room_of = _Fewest(instance)
    options = [
        _job_options(name, jobs[name], base_allocations.get(name, ()), nodes, index, room_of)
        for name in order
    ]
    return Instance(**{**vars(instance), "jobs": options})


class _Fewest:
    """On how few nodes replicas lie, asked for once per kind of replica."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._known: dict[Any, Ints] = {}

    def most(self, shape: ReplicaShape) -> int:
        """Return how many replicas of a shape the empty cluster holds."""
        reach = self._reach(shape)
        return int(reach[-1]) if reach.size else 0

    def num_nodes(self, shape: ReplicaShape, replicas: Ints) -> Ints:
        """Return the fewest nodes that hold so many replicas."""
        nodes: Ints = np.searchsorted(self._reach(shape), replicas) + 1
        return nodes

    def _reach(self, shape: ReplicaShape) -> Ints:
        key = shape.gpu_type, tuple(sorted(shape.resources.items()))
        if key not in self._known:
            self._known[key] = np.cumsum(np.sort(self._instance.fits(shape))[::-1])
        return self._known[key]


def _job_options(
    name: Any,
    job: JobInfo,
    allocation: Sequence[Any],
    nodes: Mapping[Any, NodeInfo],
    index: Mapping[Any, int],
    fewest: _Fewest,
) -> JobOptions:
    rows = [(0, 0, 0, 0.0)]
    for number, shape in enumerate(job.all_shapes):
        rows.extend(_shape_options(number, shape, job, fewest))
    base: Row = ()
    if allocation and not must_move(job, allocation, nodes):
        shape = shape_of(job, allocation, nodes)
        if _may_stay(job, shape, allocation):
            base = tuple(sorted((index[node], n) for node, n in Counter(allocation).items()))
            speedup = float(shape.speedup_fn(len(base), len(allocation)))
            number = job.all_shapes.index(shape)
            rows.append((number, len(allocation), len(base), speedup))
    shapes, replicas, num_nodes, speedups = (np.array(column) for column in zip(*rows, strict=True))
    return JobOptions(
        name, job, shapes, replicas, num_nodes, speedups.astype(float), base, bool(allocation)
    )


def _may_stay(job: JobInfo, shape: ReplicaShape, allocation: Sequence[Any]) -> bool:
    stages = allocation.num_stages if isinstance(allocation, Allocation) else None
    bounds = max(job.min_replicas, 1) <= len(allocation) <= job.most_replicas(shape)
    return bounds and stages in (None, shape.num_stages)


def _shape_options(
    number: int, shape: ReplicaShape, job: JobInfo, fewest: _Fewest
) -> Iterator[tuple[int, int, int, float]]:
    most = min(job.most_replicas(shape), fewest.most(shape))
    replicas = np.arange(max(job.min_replicas, 1), most + 1)
    if not replicas.size:
        return
    num_nodes = fewest.num_nodes(shape, replicas)
    speedups = np.asarray(shape.speedup_fn(num_nodes, replicas), dtype=float)
    best = np.maximum.accumulate(np.concatenate([[0.0], speedups[:-1]]))
    # What takes more and is not faster is never worth taking.
    for i in np.flatnonzero(speedups > best):
        yield number, int(replicas[i]), int(num_nodes[i]), float(speedups[i])
