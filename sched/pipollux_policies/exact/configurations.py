"""The configurations of every job as arrays: the choices of the exact policy.

A configuration is a shape and a number of replicas, on the fewest nodes that hold them, which meet
at the lowest network level with room for them.
Configuration 0 is the empty allocation. A running job that may stay has one more, the last: its
current allocation. Every other configuration is a restart, or, in the current shape, an elastic
resize if a replica can survive (`change_cost`).
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

from pipollux_policies.allocations.allocation import runs_as, shape_of
from pipollux_policies.allocations.change_cost import possible_survivors
from pipollux_policies.allocations.order import by_arrival
from pipollux_policies.allocations.rules import is_pinned, must_move
from pipollux_policies.jobs.job_info import JobInfo, NodeInfo, ReplicaShape, find_speedups
from pipollux_policies.placement.node_choice import Bools, Floats, Ints, NodeCounts

from .nodes import Nodes, build_nodes, close_nodes

NOTHING = 0


@dataclass(frozen=True)
class JobConfigurations:
    """All configurations of one job; the arrays, of length C, are slices of the `Table`'s."""

    name: Any
    job: JobInfo
    shapes: tuple[ReplicaShape, ...]
    shape: Ints
    """Index into `shapes`; meaningless for `NOTHING`."""
    replicas: Ints
    num_nodes: Ints
    level: Ints
    """The highest network level that costs no more than the lowest one with room."""
    speedup: Floats
    """Over one replica of the job's own shape."""
    elastic: Bools
    """Which configurations an elastic resize can reach."""
    base: NodeCounts
    """Its current nodes; empty if it holds nothing or cannot stay."""
    runs: bool
    elastic_shape: int | None = None
    """Index of the shape in which it can be resized; None: every change is a restart."""
    survivors: NodeCounts = ()

    @property
    def stay(self) -> int | None:
        """The index of the configuration to stay; None if there is none."""
        return len(self.replicas) - 1 if self.base else None

    def keeps_survivor(self, shape: int, nodes: NodeCounts) -> bool:
        """Return whether a replica survives a change to these nodes."""
        there = {node for node, _ in self.survivors}
        return shape == self.elastic_shape and any(node in there for node, _ in nodes)


@dataclass(frozen=True)
class Table:
    """All P configurations of J jobs, in order of jobs, and likewise their S shapes."""

    first: Ints
    """(J + 1,): start of the configurations of each job, then P."""
    first_shape: Ints
    """(J + 1,): start of the shapes of each job, then S."""
    job: Ints
    """(P,): index into the jobs."""
    shape: Ints
    """(P,): index into the shapes of all jobs."""
    replicas: Ints
    num_nodes: Ints
    level: Ints
    speedup: Floats
    elastic: Bools
    stay: Ints
    """(up to J,): the configurations to stay, of jobs that have one."""
    shapes: Sequence[ReplicaShape]
    kind: Ints
    """(S,): index of each shape into `kinds`."""
    kinds: Sequence[ReplicaShape]
    """One shape of each kind; shapes of a kind need the same resources on the same GPUs."""

    @cached_property
    def shape_job(self) -> Ints:
        """(S,): the job of each shape."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first_shape))

    def split(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Split values of all configurations, (P, …), by job."""
        return [values[begin:end] for begin, end in pairwise(self.first.tolist())]


class Bases(NamedTuple):
    """`JobConfigurations.base` of all jobs, as flat arrays."""

    job: Ints
    node: Ints
    replicas: Ints


@dataclass(frozen=True)
class Instance:
    """An allocation problem as arrays."""

    nodes: Nodes
    jobs: Sequence[JobConfigurations]
    """The jobs that are not pinned, oldest first."""
    table: Table
    pinned: Mapping[Any, Sequence[Any]]
    num_jobs: int
    """Number of jobs, pinned ones included."""

    @cached_property
    def need(self) -> Ints:
        """(S, T): the resources of one replica of every shape."""
        needs = [self.nodes.need(shape) for shape in self.table.kinds]
        return np.array(needs, np.int64).reshape(-1, len(self.nodes.kinds))[self.table.kind]

    @cached_property
    def share(self) -> Floats:
        """(S,): `Nodes.share` of every shape."""
        return np.array([self.nodes.share(shape) for shape in self.table.kinds])[self.table.kind]

    @cached_property
    def asked(self) -> Ints:
        """(P, T): the resources of every configuration."""
        asked: Ints = self.table.replicas[:, None] * self.need[self.table.shape]
        return asked

    @cached_property
    def bases(self) -> Bases:
        """The current nodes of the jobs that may stay."""
        entries = [(job, *entry) for job, configs in enumerate(self.jobs) for entry in configs.base]
        return Bases(*np.array(entries, np.int64).reshape(-1, 3).T)

    @cached_property
    def least_replicas(self) -> Ints:
        """(S,): the fewest replicas of each shape with a speedup above 0; 0 if there are none.

        Of a shape that does not fit at present, whose speedup is unknown, the fewest that the job
        allows, or 0 if the shape allows fewer.
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
    """Return jobs and nodes as arrays, in an order that does not depend on the mappings. `closed`
    are indices into `Nodes.names` of nodes that accept no new jobs.
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
    """Return a job's shapes, without those hidden by an earlier one.

    Of two shapes with the same number of stages for the same GPUs, only the first is effective
    (`shape_of`): an allocation has only node names and a number of stages.
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
    name: Any
    job: JobInfo
    shapes: tuple[ReplicaShape, ...]
    sizes: list[tuple[int, Ints, Ints, int]]
    """Shapes with numbers of nodes and of replicas, and the network level."""
    stay: tuple[int, int, int, int] | None
    """The same of the configuration to stay."""
    base: NodeCounts
    runs: bool
    elastic_shape: int | None
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
    sizes = [
        (number, *part)
        for number, shape in enumerate(shapes)
        for part in places.sizes_by_level(shape, job)
    ]
    if not allocation:
        return _Asked(name, job, shapes, sizes, None, (), False, None, ())
    shape = shape_of(job, allocation, nodes)
    # On a closed node a job may stay, but not change.
    possible = possible_survivors(job, allocation, nodes)
    survivors = tuple(
        sorted((index[node], n) for node, n in possible.items() if not places.closed[index[node]])
    )
    elastic_shape = shapes.index(shape) if survivors else None
    if not _may_stay(job, shape, allocation, nodes):
        return _Asked(name, job, shapes, sizes, None, (), True, elastic_shape, survivors)
    base = tuple(sorted((index[node], n) for node, n in Counter(allocation).items()))
    level = places.topology.level(node for node, _ in base) if len(base) > 1 else 1
    stay = shapes.index(shape), len(base), len(allocation), level
    return _Asked(name, job, shapes, sizes, stay, base, True, elastic_shape, survivors)


def _may_stay(
    job: JobInfo, shape: ReplicaShape, allocation: Sequence[Any], nodes: Mapping[Any, NodeInfo]
) -> bool:
    if must_move(job, allocation, nodes) or not all(shape.runs_on(nodes[n]) for n in allocation):
        return False
    within = job.least_replicas <= len(allocation) <= job.most_replicas(shape)
    return within and runs_as(allocation, shape)


def _tabulate(asked: Sequence[_Asked]) -> tuple[list[JobConfigurations], Table]:
    sizes = [(job, *size) for job, one in enumerate(asked) for size in one.sizes if size[2].size]
    stays = [(job, *one.stay) for job, one in enumerate(asked) if one.stay]
    found = find_speedups(
        (asked[job].shapes[shape], num_nodes, replicas, level)
        for job, shape, num_nodes, replicas, level in (*sizes, *stays)
    )
    counts = np.array([len(size[3]) for size in sizes], np.int64)
    speedup = np.concatenate([_NO_SPEEDUPS, *found[: len(sizes)]])
    kept = _worth_it(speedup, counts)
    _drop_slower(kept, speedup, counts, [size[:2] for size in sizes])
    of_size, of_stay = (
        np.array([one[:2] for one in part], np.int64).reshape(-1, 2).T for part in (sizes, stays)
    )
    stay_nodes, stay_replicas, stay_level = (
        np.array([one[2:] for one in stays], np.int64).reshape(-1, 3).T
    )
    every, no_job = np.arange(len(asked)), np.zeros(len(asked), np.int64)
    job, shape = np.repeat(of_size, counts, axis=1)[:, kept]
    # Per job: the empty configuration, the sizes of each shape, the one to stay.
    rank = np.concatenate([3 * every, 3 * job + 1, 3 * of_stay[0] + 2])
    order = np.argsort(rank, kind="stable")
    job = rank[order] // 3
    first = _starts(np.bincount(job, minlength=len(asked)))
    own = np.concatenate([no_job, shape, of_stay[1]])[order]
    replicas = np.concatenate([_NO_SIZES, *(size[3] for size in sizes)])[kept]
    num_nodes = np.concatenate([_NO_SIZES, *(size[2] for size in sizes)])[kept]
    level = np.repeat(np.array([size[4] for size in sizes], np.int64), counts)[kept]
    replicas = np.concatenate([no_job, replicas, stay_replicas])[order]
    elastic_shape = np.array(
        [-1 if one.elastic_shape is None else one.elastic_shape for one in asked]
    )
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
        level=np.concatenate([no_job + 1, level, stay_level])[order],
        speedup=np.concatenate(
            [np.zeros(len(asked)), speedup[kept], np.array(found[len(sizes) :], np.float64)]
        )[order],
        elastic=(replicas > 0) & (own == elastic_shape[job]),
        stay=first[1:][of_stay[0]] - 1,
        shapes=shapes,
        kind=np.array(kind, np.int64),
        kinds=[shape for _, shape in kinds.values()],
    )
    columns = own, replicas, table.num_nodes, table.level, table.speedup, table.elastic
    parts = zip(*map(table.split, columns), strict=True)
    configs = [
        JobConfigurations(
            name=one.name,
            job=one.job,
            shapes=one.shapes,
            shape=shape,
            replicas=count,
            num_nodes=num_nodes,
            level=level,
            speedup=speedup,
            elastic=elastic,
            base=one.base,
            runs=one.runs,
            elastic_shape=one.elastic_shape,
            survivors=one.survivors,
        )
        for one, (shape, count, num_nodes, level, speedup, elastic) in zip(
            asked, parts, strict=True
        )
    ]
    return configs, table


_NO_SIZES, _NO_SPEEDUPS = np.zeros(0, np.int64), np.zeros(0)


def _starts(counts: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)])


def _worth_it(speedup: Floats, counts: Ints) -> Bools:
    """Return which sizes are useful: those that are faster than every smaller one. Sizes ascend,
    `counts` of them for each shape. Speedups that are not finite are replaced.
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


def _drop_slower(
    kept: Bools, speedup: Floats, counts: Ints, owners: Sequence[tuple[int, int]]
) -> None:
    """Drop sizes that are no faster than a smaller one at a lower network level. `owners` are the
    job and shape of each part of the sizes; the parts of one shape are adjacent and ascend.
    """
    begin, best, last = 0, 0.0, None
    for count, owner in zip(counts.tolist(), owners, strict=True):
        end = begin + count
        if owner == last:
            kept[begin:end] &= speedup[begin:end] > best
            best = max(best, float(speedup[begin:end].max()))
        else:
            best = float(speedup[begin:end].max())
        begin, last = end, owner
