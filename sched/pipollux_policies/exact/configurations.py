"""The configurations of every job as arrays: the choices of the exact policy.

A configuration is a shape and a number of replicas, on the fewest nodes that hold them.
Configuration 0 is to get nothing. A running job that may stay has one more, the last: to stay as it
is, on whatever nodes it lies. Every other configuration is a restart, or, in the shape in which the
job runs, an elastic resize if a replica can survive it (`change_cost`).

What pinned jobs hold is taken off the nodes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipollux_policies.allocation import runs_as, shape_of
from pipollux_policies.change_cost import possible_survivors
from pipollux_policies.job_info import JobInfo, NodeInfo, ReplicaShape, find_speedups
from pipollux_policies.order import by_arrival
from pipollux_policies.placement.node_choice import Bools, Floats, Ints, NodeCounts
from pipollux_policies.rules import is_pinned, must_move

from .nodes import Nodes, build_nodes, close_nodes

NOTHING = 0
"""The index of the configuration to get nothing."""


@dataclass(frozen=True)
class JobConfigurations:
    """All configurations of one job; arrays of length C, which are parts of the `Table`'s."""

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
    live: Bools
    """Which configurations a survivor can reach."""
    base: NodeCounts
    """Where it lies now; empty if it holds nothing, or cannot stay."""
    runs: bool
    """Whether it holds something, so that any change has a price."""
    live_shape: int | None = None
    """Index of the shape in which it can be resized; None: every change is a restart."""
    survivors: NodeCounts = ()
    """Replicas in `live_shape` that can survive a change."""

    @property
    def stay(self) -> int | None:
        """The index of the configuration to stay as it is, if there is one."""
        return len(self.replicas) - 1 if self.base else None

    def keeps_survivor(self, shape: int, nodes: NodeCounts) -> bool:
        """Tell whether a replica survives a change to these nodes."""
        there = {node for node, _ in self.survivors}
        return shape == self.live_shape and any(node in there for node, _ in nodes)


@dataclass(frozen=True)
class Table:
    """All P configurations of J jobs, one job after the other, and their S shapes likewise."""

    first: Ints
    """Where the configurations of each job begin, and P: (J + 1,)."""
    first_shape: Ints
    """Where the shapes of each job begin, and S: (J + 1,)."""
    job: Ints
    """Index into the jobs: (P,)."""
    shape: Ints
    """Index into all shapes of all jobs: (P,)."""
    replicas: Ints
    num_nodes: Ints
    speedup: Floats
    live: Bools
    stay: Ints
    """Configurations to stay as it is, of jobs that may: (up to J,)."""
    shapes: Sequence[ReplicaShape]
    """(S,)"""
    kind: Ints
    """Of each shape, an index into `kinds`: (S,)."""
    kinds: Sequence[ReplicaShape]
    """A shape of each kind: those of a kind hold the same resources, on the same GPUs."""

    @cached_property
    def shape_job(self) -> Ints:
        """The job of each shape: (S,)."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first_shape))

    def split(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the values of each job's configurations, of those of all: (P, …)."""
        return [values[begin:end] for begin, end in pairwise(self.first.tolist())]


class Bases(NamedTuple):
    """`JobConfigurations.base` of all jobs, one entry after the other."""

    job: Ints
    node: Ints
    replicas: Ints


@dataclass(frozen=True)
class Instance:
    """An allocation problem as arrays."""

    nodes: Nodes
    jobs: Sequence[JobConfigurations]
    """Jobs that are not pinned, the oldest first."""
    table: Table
    """The configurations of all of them."""
    pinned: Mapping[Any, Sequence[Any]]
    """Allocations that stay as they are."""
    num_jobs: int
    """Pinned ones included."""

    @cached_property
    def need(self) -> Ints:
        """What a replica of every shape holds: (S, T)."""
        needs = [self.nodes.need(shape) for shape in self.table.kinds]
        return np.array(needs, np.int64).reshape(-1, len(self.nodes.kinds))[self.table.kind]

    @cached_property
    def share(self) -> Floats:
        """`Nodes.share` of every shape: (S,)."""
        return np.array([self.nodes.share(shape) for shape in self.table.kinds])[self.table.kind]

    @cached_property
    def asked(self) -> Ints:
        """The resources of every configuration: (P, T)."""
        asked: Ints = self.table.replicas[:, None] * self.need[self.table.shape]
        return asked

    @cached_property
    def bases(self) -> Bases:
        """Where jobs lie that may stay."""
        entries = [(job, *entry) for job, configs in enumerate(self.jobs) for entry in configs.base]
        return Bases(*np.array(entries, np.int64).reshape(-1, 3).T)

    @cached_property
    def least_replicas(self) -> Ints:
        """The fewest replicas of every shape that are worth something, (S,); 0: there are none.

        Where none fit now, so that it is not known, the fewest that may be; 0 if they are too many.
        """
        table = self.table
        most = np.iinfo(np.int64).max
        least = np.full(len(table.shapes), most)
        some = table.replicas > 0
        np.minimum.at(least, table.shape[some], table.replicas[some])
        for number in np.flatnonzero(least == most).tolist():
            shape, job = table.shapes[number], self.jobs[table.shape_job[number]].job
            reach, fewest = self.nodes.reach(shape), job.least_replicas
            fits_now = bool(reach.size) and int(reach[-1]) >= fewest
            unknown = not fits_now and fewest <= job.most_replicas(shape)
            least[number] = fewest if unknown else 0
        return least


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
        if not job.preemptible and is_pinned(job, base_allocations.get(name, ()), nodes)
    }
    places = build_nodes(jobs, nodes, pinned, node_template)
    index = {name: number for number, name in enumerate(places.names)}
    order = [name for name in by_arrival(jobs) if name not in pinned]
    if closed:
        held = {name: base_allocations.get(name, ()) for name in order}
        close_nodes(places, list(closed), held, jobs, nodes)
    asked = [
        _ask(name, jobs[name], base_allocations.get(name, ()), nodes, places, index)
        for name in order
    ]
    configs, table = _tabulate(asked)
    return Instance(places, configs, table, pinned, len(jobs))


def counting_shapes(job: JobInfo) -> tuple[ReplicaShape, ...]:
    """Return a job's shapes without those that an earlier one hides.

    Node names and the number of stages identify an allocation; of two shapes with the same number
    of stages for the same GPUs, the first counts (`shape_of`).
    """
    if not job.shapes:
        return job.all_shapes
    seen: set[tuple[int, str | None]] = set()
    counting = []
    for shape in job.all_shapes:
        if {(shape.num_stages, shape.gpu_type), (shape.num_stages, None)}.isdisjoint(seen):
            seen.add((shape.num_stages, shape.gpu_type))
            counting.append(shape)
    return tuple(counting)


class _Asked(NamedTuple):
    """One job, and what there is to choose."""

    name: Any
    job: JobInfo
    shapes: tuple[ReplicaShape, ...]
    sizes: list[tuple[int, Ints, Ints]]
    """A shape with numbers of nodes and of replicas."""
    stay: tuple[int, int, int] | None
    """The shape, nodes and replicas with which it may stay."""
    base: NodeCounts
    runs: bool
    live_shape: int | None
    survivors: NodeCounts


def _ask(
    name: Any,
    job: JobInfo,
    allocation: Sequence[Any],
    nodes: Mapping[Any, NodeInfo],
    places: Nodes,
    index: Mapping[Any, int],
) -> _Asked:
    shapes = counting_shapes(job)
    sizes = [(number, *places.sizes(shape, job)) for number, shape in enumerate(shapes)]
    if not allocation:
        return _Asked(name, job, shapes, sizes, None, (), False, None, ())
    shape = shape_of(job, allocation, nodes)
    # On a closed node a job may stay as it is, and not otherwise.
    possible = possible_survivors(job, allocation, nodes)
    survivors = tuple(
        sorted((index[node], n) for node, n in possible.items() if not places.closed[index[node]])
    )
    live_shape = shapes.index(shape) if survivors else None
    if not _may_stay(job, shape, allocation, nodes):
        return _Asked(name, job, shapes, sizes, None, (), True, live_shape, survivors)
    base = tuple(sorted((index[node], n) for node, n in Counter(allocation).items()))
    stay = shapes.index(shape), len(base), len(allocation)
    return _Asked(name, job, shapes, sizes, stay, base, True, live_shape, survivors)


def _may_stay(
    job: JobInfo, shape: ReplicaShape, allocation: Sequence[Any], nodes: Mapping[Any, NodeInfo]
) -> bool:
    if must_move(job, allocation, nodes) or not all(shape.runs_on(nodes[n]) for n in allocation):
        return False
    within = job.least_replicas <= len(allocation) <= job.most_replicas(shape)
    return within and runs_as(allocation, shape)


def _tabulate(asked: Sequence[_Asked]) -> tuple[list[JobConfigurations], Table]:
    """Return the configurations of each job, and of all of them."""
    sizes = [(job, *size) for job, one in enumerate(asked) for size in one.sizes if size[2].size]
    stays = [(job, *one.stay) for job, one in enumerate(asked) if one.stay]
    found = find_speedups(
        (asked[job].shapes[shape], num_nodes, replicas)
        for job, shape, num_nodes, replicas in (*sizes, *stays)
    )
    counts = np.array([len(size[3]) for size in sizes], np.int64)
    speedup = np.concatenate([_NO_SPEEDUPS, *found[: len(sizes)]])
    kept = _worth_it(speedup, counts)
    of_size, of_stay = (
        np.array([one[:2] for one in part], np.int64).reshape(-1, 2).T for part in (sizes, stays)
    )
    stay_nodes, stay_replicas = np.array([one[2:] for one in stays], np.int64).reshape(-1, 2).T
    every, no_job = np.arange(len(asked)), np.zeros(len(asked), np.int64)
    job, shape = np.repeat(of_size, counts, axis=1)[:, kept]
    # Nothing, then the sizes of each shape, then to stay.
    rank = np.concatenate([3 * every, 3 * job + 1, 3 * of_stay[0] + 2])
    order = np.argsort(rank, kind="stable")
    job = rank[order] // 3
    first = _starts(np.bincount(job, minlength=len(asked)))
    own = np.concatenate([no_job, shape, of_stay[1]])[order]
    replicas = np.concatenate([_NO_SIZES, *(size[3] for size in sizes)])[kept]
    num_nodes = np.concatenate([_NO_SIZES, *(size[2] for size in sizes)])[kept]
    replicas = np.concatenate([no_job, replicas, stay_replicas])[order]
    live_shape = np.array([-1 if one.live_shape is None else one.live_shape for one in asked])
    first_shape = _starts(np.array([len(one.shapes) for one in asked], np.int64))
    shapes = [shape for one in asked for shape in one.shapes]
    kinds: dict[Any, tuple[int, ReplicaShape]] = {}
    kind = [kinds.setdefault(shape.holds, (len(kinds), shape))[0] for shape in shapes]
    table = Table(
        first=first,
        first_shape=first_shape,
        job=job,
        shape=first_shape[job] + own,
        replicas=replicas,
        num_nodes=np.concatenate([no_job, num_nodes, stay_nodes])[order],
        speedup=np.concatenate(
            [np.zeros(len(asked)), speedup[kept], np.array(found[len(sizes) :], np.float64)]
        )[order],
        live=(replicas > 0) & (own == live_shape[job]),
        stay=first[1:][of_stay[0]] - 1,
        shapes=shapes,
        kind=np.array(kind, np.int64),
        kinds=[shape for _, shape in kinds.values()],
    )
    columns = own, replicas, table.num_nodes, table.speedup, table.live
    parts = zip(*map(table.split, columns), strict=True)
    configs = [
        JobConfigurations(
            name=one.name,
            job=one.job,
            shapes=one.shapes,
            shape=shape,
            replicas=count,
            num_nodes=num_nodes,
            speedup=speedup,
            live=live,
            base=one.base,
            runs=one.runs,
            live_shape=one.live_shape,
            survivors=one.survivors,
        )
        for one, (shape, count, num_nodes, speedup, live) in zip(asked, parts, strict=True)
    ]
    return configs, table


_NO_SIZES, _NO_SPEEDUPS = np.zeros(0, np.int64), np.zeros(0)


def _starts(counts: Ints) -> Ints:
    """Return where parts of such lengths begin, one after the other, and where the last ends."""
    return np.concatenate([[0], np.cumsum(counts)])


def _worth_it(speedup: Floats, counts: Ints) -> Bools:
    """Tell which sizes may be chosen: none that takes more than another one and is not faster.

    What is not a finite speedup is replaced by one that is.

    Args:
        speedup: of the sizes of each shape of each job, in ascending order.
        counts: how many they are of each.
    """
    kept = np.empty(len(speedup), bool)
    starts = _starts(counts)[:-1]
    for count in np.unique(counts).tolist():
        where = starts[counts == count, None] + np.arange(count)
        values = speedup[where]
        if not np.isfinite(values).all():
            speedup[where] = values = np.nan_to_num(values)
        best = np.maximum.accumulate(
            np.concatenate([np.zeros((len(values), 1)), values[:, :-1]], axis=1), axis=1
        )
        kept[where] = values > best
    return kept
