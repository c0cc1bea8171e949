"""The configurations of every job as arrays: the choices of the exact policy.

A configuration is a shape and a number of replicas, on the fewest nodes that hold them.
Configuration 0 is to get nothing. A running job that may stay has one more, the last: to stay as it
is, on whatever nodes it lies. Every other configuration is a restart, or, in the shape in which the
job runs, a live change if a replica can survive it (`change_cost`).

What pinned jobs hold is taken off the nodes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipollux_sched.policy.allocation import shape_of
from pipollux_sched.policy.change_cost import possible_survivors
from pipollux_sched.policy.job_info import JobInfo, NodeInfo, ReplicaShape, prepare_speedups
from pipollux_sched.policy.order import by_arrival, by_safety
from pipollux_sched.policy.placement.node_choice import (
    Bools,
    Floats,
    Ints,
    NodeCounts,
    amounts,
    num_fitting,
)
from pipollux_sched.policy.rules import (
    is_pinned,
    must_move,
    usable_nodes,
)

NOTHING = 0
"""The index of the configuration to get nothing."""


@dataclass(frozen=True)
class JobConfigurations:
    """All configurations of one job; arrays of length C."""

    name: Any
    job: JobInfo
    shapes: tuple[ReplicaShape, ...]
    """The job's shapes that count (`counting_shapes`)."""
    shape: Ints
    """Index into `shapes`; without meaning for `NOTHING`."""
    replicas: Ints
    num_nodes: Ints
    speedup: Floats
    """Over one replica of the job's own shape."""
    base: NodeCounts
    """Where it lies now; empty if it holds nothing, or cannot stay."""
    runs: bool
    """Whether it holds something, so that any change has a price."""
    live_shape: int | None = None
    """Index of the shape in which it can be changed live; None: every change is a restart."""
    survivors: NodeCounts = ()
    """Replicas in `live_shape` that can survive a change."""

    @property
    def stay(self) -> int | None:
        """The index of the configuration to stay as it is, if there is one."""
        return len(self.replicas) - 1 if self.base else None

    @cached_property
    def live(self) -> Bools:
        """Tell which configurations a survivor can reach: (C,)."""
        live: Bools = (self.replicas > 0) & (self.shape == self.live_shape)
        return live

    def keeps_survivor(self, shape: int, nodes: NodeCounts) -> bool:
        """Tell whether a replica survives a change to these nodes."""
        there = {node for node, _ in self.survivors}
        return shape == self.live_shape and any(node in there for node, _ in nodes)


@dataclass(frozen=True)
class Instance:
    """An allocation problem as arrays."""

    nodes: Nodes
    jobs: Sequence[JobConfigurations]
    """Jobs that are not pinned, the oldest first."""
    pinned: Mapping[Any, Sequence[Any]]
    """Allocations that stay as they are."""
    num_jobs: int
    """Pinned ones included."""

    @cached_property
    def asked(self) -> Sequence[Ints]:
        """By job, the resources of every configuration: (C, T)."""
        return [self._asked(configs) for configs in self.jobs]

    def _asked(self, configs: JobConfigurations) -> Ints:
        needs = [self.nodes.need(shape) for shape in configs.shapes]
        each = needs[0] if len(needs) == 1 else np.stack(needs)[configs.shape]
        asked: Ints = configs.replicas[:, None] * each
        return asked


def build_instance(
    jobs: Mapping[Any, JobInfo],
    nodes: Mapping[Any, NodeInfo],
    base_allocations: Mapping[Any, Sequence[Any]],
    node_template: NodeInfo,
    closed: Sequence[int] = (),
) -> Instance:
    """Return jobs and nodes as arrays, whatever the order of the mappings.

    Args:
        jobs: all jobs, by name.
        nodes: all nodes, by name.
        base_allocations: what runs now.
        node_template: a node as could be rented.
        closed: indices into `Nodes.names` of nodes that take no new jobs.
    """
    pinned = {
        name: base_allocations[name]
        for name, job in jobs.items()
        if is_pinned(job, base_allocations.get(name, ()), nodes)
    }
    places = _build_nodes(jobs, nodes, pinned, node_template)
    index = {name: number for number, name in enumerate(places.names)}
    order = [name for name in by_arrival(jobs) if name not in pinned]
    if closed:
        held = {name: base_allocations.get(name, ()) for name in order}
        _close(places, list(closed), held, jobs, nodes)
    _prepare({name: jobs[name] for name in order}, base_allocations, nodes, places)
    configs = [
        _job_configurations(name, jobs[name], base_allocations.get(name, ()), nodes, places, index)
        for name in order
    ]
    return Instance(places, configs, pinned, len(jobs))


def _prepare(
    jobs: Mapping[Any, JobInfo],
    allocations: Mapping[Any, Sequence[Any]],
    nodes: Mapping[Any, NodeInfo],
    places: Nodes,
) -> None:
    """Have all speedups that configurations need computed together."""
    asked: list[tuple[ReplicaShape, Any, Any]] = []
    for name, job in jobs.items():
        asked.extend((shape, *places.sizes(shape, job)) for shape in counting_shapes(job))
        held = allocations.get(name, ())
        if held:
            asked.append((shape_of(job, held, nodes), len(set(held)), len(held)))
    prepare_speedups(asked)


def counting_shapes(job: JobInfo) -> tuple[ReplicaShape, ...]:
    """Return a job's shapes without those that an earlier one hides.

    Node names and the number of stages identify an allocation; of two shapes with the same number
    of stages for the same GPUs, the first counts (`shape_of`).
    """
    seen: set[tuple[int, str | None]] = set()
    counting = []
    for shape in job.all_shapes:
        if {(shape.num_stages, shape.gpu_type), (shape.num_stages, None)}.isdisjoint(seen):
            seen.add((shape.num_stages, shape.gpu_type))
            counting.append(shape)
    return tuple(counting)


def _job_configurations(
    name: Any,
    job: JobInfo,
    allocation: Sequence[Any],
    nodes: Mapping[Any, NodeInfo],
    places: Nodes,
    index: Mapping[Any, int],
) -> JobConfigurations:
    shapes = counting_shapes(job)
    parts = [_NOTHING_PART]
    for number, shape in enumerate(shapes):
        parts.append(_shape_configurations(number, shape, job, places))
    base: NodeCounts = ()
    live_shape: int | None = None
    open_survivors: NodeCounts = ()
    if allocation:
        shape = shape_of(job, allocation, nodes)
        # On a closed node a job may stay as it is, and not otherwise.
        open_survivors = tuple(
            sorted(
                (index[node], n)
                for node, n in possible_survivors(job, allocation, nodes).items()
                if not places.closed[index[node]]
            )
        )
        live_shape = shapes.index(shape) if open_survivors else None
        if _may_stay(job, shape, allocation, nodes):
            base = tuple(sorted((index[node], n) for node, n in Counter(allocation).items()))
            speedup = float(shape.speedup_fn(len(base), len(allocation)))
            parts.append(_part(shapes.index(shape), [len(allocation)], [len(base)], [speedup]))
    shape_of_row, replicas, num_nodes, speedups = map(np.concatenate, zip(*parts, strict=True))
    return JobConfigurations(
        *(name, job, shapes, shape_of_row, replicas, num_nodes, speedups, base, bool(allocation)),
        live_shape=live_shape,
        survivors=open_survivors,
    )


def _may_stay(
    job: JobInfo, shape: ReplicaShape, allocation: Sequence[Any], nodes: Mapping[Any, NodeInfo]
) -> bool:
    if must_move(job, allocation, nodes) or not all(shape.runs_on(nodes[n]) for n in allocation):
        return False
    stages = getattr(allocation, "num_stages", None)
    within = job.least_replicas <= len(allocation) <= job.most_replicas(shape)
    return within and stages in (None, shape.num_stages)


class _Part(NamedTuple):
    """Some configurations of a job, as the arrays of `JobConfigurations`."""

    shape: Ints
    replicas: Ints
    num_nodes: Ints
    speedup: Floats


def _part(shape: int, replicas: ArrayLike, num_nodes: ArrayLike, speedup: ArrayLike) -> _Part:
    counts = np.asarray(replicas, dtype=np.int64)
    nodes = np.asarray(num_nodes, dtype=np.int64)
    return _Part(np.full_like(counts, shape), counts, nodes, np.asarray(speedup, dtype=np.float64))


_NOTHING_PART = _part(0, [0], [0], [0.0])


def _shape_configurations(number: int, shape: ReplicaShape, job: JobInfo, places: Nodes) -> _Part:
    num_nodes, replicas = places.sizes(shape, job)
    if not replicas.size:
        return _part(number, [], [], [])
    speedups = np.asarray(shape.speedup_fn(num_nodes, replicas), dtype=np.float64)
    if speedups.shape != replicas.shape or not np.isfinite(speedups).all():
        speedups = np.nan_to_num(np.broadcast_to(speedups, replicas.shape))
    # What takes more and is not faster is never chosen.
    best = np.maximum.accumulate(np.concatenate([[0.0], speedups[:-1]]))
    worth = speedups > best
    return _part(number, replicas[worth], num_nodes[worth], speedups[worth])
