"""Promises of room to jobs that are behind, the furthest behind first.

A job that is behind (`completion_time`) gets its least configuration before other jobs get more. If
not all of them fit together, a sum over jobs would always prefer narrow ones. So the order is
strict:

1. A running job within its turn keeps its least configuration, in place.
2. Then the others, by seconds behind. Each is placed as if only pinned jobs and the jobs before it
were present. If it does not fit although enough is free in total, earlier jobs that are in its way
are placed elsewhere.
3. For a job that does not fit, the node with most of its room free is closed: it accepts no new
jobs, so that it drains. Another node is chosen only if it has more free room, so the next decision
closes the same node until the job fits, without any state between decisions.

At most the promised part of the cluster's nodes are closed at once, and at least one may be. The
queue ahead of a waiting job never grows, as all jobs fall behind at the same rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pipollux_policies.placement.node_choice import (
    Bools,
    Ints,
    NodeCapacity,
    NodeCounts,
    frozen,
    num_fitting,
)

from .configurations import Instance
from .fair_share import FairClaim

_ATTEMPTS = 8


class Behind(NamedTuple):
    """A job that has held slots for less than its part."""

    job: int
    seconds: float
    """Seconds for which it should have held its least configuration by now, minus those it did."""


class Least(NamedTuple):
    """One shape of a job with its fewest replicas."""

    shape: int
    replicas: int
    slots: int


class Place(NamedTuple):
    """A place promised to a job."""

    shape: int
    nodes: NodeCounts


class Floor(NamedTuple):
    """The least speedups that keep a promise, for a job that stays as it is, or is changed."""

    stays: float = 0.0
    moved: float = 0.0


@dataclass(frozen=True)
class Reservations:
    """Allocations that must be kept before any gain counts."""

    places: dict[int, Place] = field(default_factory=dict)
    """By job; all of them fit together, beside the pinned jobs."""
    closed: tuple[int, ...] = ()
    floors: dict[int, Floor] = field(default_factory=dict)
    """By job, the speedups that keep its promise; without an entry, any allocation does."""


def least_configurations(instance: Instance, job: int) -> list[Least]:
    """Return the least configuration of a job in each of its shapes, the fewest slots first. Shapes
    that fit nowhere now are included: pinned jobs may be in the way.
    """
    first = instance.table.first_shape[job]
    shapes = instance.jobs[job].shapes
    fewest = instance.least_replicas[first : first + len(shapes)].tolist()
    found = [
        Least(number, count, count * shape.slots)
        for number, (shape, count) in enumerate(zip(shapes, fewest, strict=True))
        if count
    ]
    return sorted(found, key=lambda least: least.slots)


def least_slots(instance: Instance) -> Ints:
    """Return the fewest slots of each job, (J,); 0: it cannot run."""
    table = instance.table
    most = np.iinfo(np.int64).max
    fewest = instance.least_replicas
    slots = np.array([shape.slots for shape in table.shapes], np.int64) * fewest
    least = np.minimum.reduceat(np.where(fewest > 0, slots, most), table.first_shape[:-1])
    return np.where(least == most, 0, least)


def keep(instance: Instance, behind: Sequence[Behind], part: float) -> Reservations:
    """Promise room to jobs that are behind; running ones that may stay keep their least
    configuration. `part` is the share of nodes that may be closed; one may always be.
    """
    if not behind or not instance.nodes.names:
        return Reservations()
    running = [entry for entry in behind if instance.jobs[entry.job].base]
    ledger = _Ledger(instance, max(1, int(part * len(instance.nodes.names))))
    for entry in running:
        ledger.hold(entry.job)
    waiting = [entry for entry in behind if not instance.jobs[entry.job].base]
    # Ties: the older job first, which is the order of an instance's jobs.
    for entry in sorted(waiting, key=lambda entry: (-entry.seconds, entry.job)):
        ledger.promise(entry.job)
    return Reservations(ledger.places, tuple(ledger.closed))


def grant(instance: Instance, claims: Sequence[FairClaim], part: float) -> Reservations:
    """Promise jobs the speedups that they claim, as many as fit, the most urgent first.

    If the claim does not fit, a job is promised the most that fits; if nothing fits, it is served
    as in `keep`: others make room for its least configuration, or a node drains.
    """
    if not claims or not instance.nodes.names:
        return Reservations()
    ledger = _Ledger(instance, max(1, int(part * len(instance.nodes.names))))
    for claim in claims:
        ledger.grant(claim)
    floors = {claim.job: ledger.floor(claim) for claim in claims if claim.job in ledger.places}
    return Reservations(ledger.places, tuple(ledger.closed), floors)


class _Ledger:
    """The promises so far, and the remaining capacity of the nodes."""

    def __init__(self, instance: Instance, most_closed: int) -> None:
        self._instance = instance
        self._nodes = instance.nodes
        self._capacity = NodeCapacity(instance.nodes.free, instance.nodes.topology)
        self._open: Bools = np.ones(len(instance.nodes.names), dtype=bool)
        self._still_open: dict[int, Bools] = {}
        self._most_closed = most_closed
        self._hopeless: set[tuple[bytes, bytes, int]] = set()
        self._joining: Ints = np.zeros(len(instance.nodes.names), dtype=np.int64)
        self.places: dict[int, Place] = {}
        self.closed: list[int] = []

    def hold(self, job: int) -> None:
        configs = self._instance.jobs[job]
        stay = configs.stay
        assert stay is not None  # noqa: S101  # it has a base
        shape = int(configs.shape[stay])
        first = self._instance.table.first_shape[job]
        least = int(self._instance.least_replicas[first + shape])
        left = least or int(configs.replicas[stay])
        nodes = []
        for node, count in sorted(configs.base, key=lambda entry: -entry[1]):
            if left > 0:
                nodes.append((node, min(count, left)))
            left -= count
        self._put(job, Place(shape, tuple(sorted(nodes))))

    def promise(self, job: int) -> None:
        leasts = least_configurations(self._instance, job)
        for least in leasts:
            need, allowed = self._wanted(job, least)
            # If it did not fit before, it does not fit now: room only shrinks.
            if self._hopeless and self._key(need, allowed, least) in self._hopeless:
                continue
            nodes = self._capacity.find(need, allowed, least.replicas)
            if nodes is None:
                nodes = self._make_room(need, allowed, least.replicas)
            if nodes is not None:
                self._put(job, Place(least.shape, nodes))
                return
            self._hopeless.add(self._key(need, allowed, least))
        if leasts:
            self._close(job, leasts[0])

    @staticmethod
    def _key(need: Ints, allowed: Bools, least: Least) -> tuple[bytes, bytes, int]:
        return need.tobytes(), allowed.tobytes(), least.replicas

    def grant(self, claim: FairClaim) -> None:
        """Promise a job its claim, or the most that fits. A running job stays if a change saves
        less than it costs: there may be room only for its size.
        """
        place = self._kept(claim) or self._found(claim.job, claim.wanted)
        if place is not None and not self._is_worth(claim, place):
            place = self._base(claim.job) or place
        if place is None:
            self.promise(claim.job)
        else:
            self._put(claim.job, place)

    def floor(self, claim: FairClaim) -> Floor:
        """Return the speedups that keep a promise, at most those of the promised place."""
        place = self.places[claim.job]
        configs = self._instance.jobs[claim.job]
        has, stay = self._speedup(claim.job, place), configs.stay
        # Do not change a job for an allocation that is no faster.
        stays = min(claim.stays, has)
        if stay is not None and place == (configs.shape[stay], configs.base):
            return Floor(stays, claim.moved)
        return Floor(stays, min(claim.moved, has))

    def _kept(self, claim: FairClaim) -> Place | None:
        configs = self._instance.jobs[claim.job]
        stay = configs.stay
        if stay is None or configs.speedup[stay] < claim.stays:
            return None
        return self._base(claim.job)

    def _base(self, job: int) -> Place | None:
        configs = self._instance.jobs[job]
        stay = configs.stay
        if stay is None:
            return None
        shape = int(configs.shape[stay])
        need = self._nodes.need(configs.shapes[shape])
        return Place(shape, configs.base) if self._capacity.accepts(configs.base, need) else None

    def _is_worth(self, claim: FairClaim, place: Place) -> bool:
        """Return whether a place saves the cost of the change; True if the job cannot stay."""
        configs = self._instance.jobs[claim.job]
        if configs.stay is None:
            return True
        has = float(configs.speedup[configs.stay])
        return claim.is_worth(has, self._speedup(claim.job, place))

    def _speedup(self, job: int, place: Place) -> float:
        replicas = sum(count for _, count in place.nodes)
        shape = self._instance.jobs[job].shapes[place.shape]
        level = self._nodes.topology.level(node for node, _ in place.nodes)
        return float(shape.speedup_at(level)(len(place.nodes), replicas))

    def _found(self, job: int, speedup: float) -> Place | None:
        """Return a place for the cheapest configuration with a speedup, or else for the fastest."""
        configs = self._instance.jobs[job]
        slots = (
            configs.replicas * np.array([shape.slots for shape in configs.shapes])[configs.shape]
        )
        wanted = [self._wanted(job, Least(n, 0, 0)) for n in range(len(configs.shapes))]
        most = np.array([self._capacity.most(need, allowed) for need, allowed in wanted])
        fits = (configs.speedup > 0) & (configs.replicas <= most[configs.shape])
        enough = np.flatnonzero(fits & (configs.speedup >= speedup))
        less = np.flatnonzero(fits & (configs.speedup < speedup))
        order = [*enough[np.argsort(slots[enough], kind="stable")]]
        order += [*less[np.argsort(-configs.speedup[less], kind="stable")]]
        for config in order:
            number = int(configs.shape[config])
            nodes = self._capacity.find(*wanted[number], int(configs.replicas[config]))
            if nodes is not None:
                return Place(number, nodes)
        return None

    def _wanted(self, job: int, least: Least) -> tuple[Ints, Bools]:
        shape = self._instance.jobs[job].shapes[least.shape]
        need, allowed = self._nodes.wanted(shape)
        if self.closed:
            if id(allowed) not in self._still_open:
                self._still_open[id(allowed)] = frozen(allowed & self._open)
            allowed = self._still_open[id(allowed)]
        return need, allowed

    def _put(self, job: int, place: Place) -> None:
        self._capacity.put(place.nodes, self._need(job, place))
        self.places[job] = place
        self._count_joining_replica(job, place, 1)

    def _take(self, job: int) -> Place:
        place = self.places.pop(job)
        self._capacity.take(place.nodes, self._need(job, place))
        self._count_joining_replica(job, place, -1)
        return place

    def _count_joining_replica(self, job: int, place: Place, sign: int) -> None:
        there = {node for node, _ in self._instance.jobs[job].base}
        for node, _ in place.nodes:
            self._joining[node] += sign * (node not in there)

    def _need(self, job: int, place: Place) -> Ints:
        return self._nodes.need(self._instance.jobs[job].shapes[place.shape])

    def _make_room(self, need: Ints, allowed: Bools, replicas: int) -> NodeCounts | None:
        """Move jobs away from one node so that replicas fit there; None if that fails."""
        capacity = np.where(allowed, num_fitting(need, self._nodes.free), 0)
        possible = np.flatnonzero(capacity >= replicas)
        if not possible.size or (self._capacity.free.sum(axis=0) < replicas * need).any():
            return None
        missing = np.maximum(replicas * need - self._capacity.free[possible], 0).sum(axis=1)
        for node in possible[np.argsort(missing, kind="stable")][:_ATTEMPTS].tolist():
            if self._clear(node, replicas * need):
                return ((node, replicas),)
        return None

    def _clear(self, node: int, wanted: Ints) -> bool:
        there = [
            job for job, place in self.places.items() if place.nodes and place.nodes[0][0] == node
        ]
        there = [job for job in there if len(self.places[job].nodes) == 1]
        moved: dict[int, Place] = {}
        for job in sorted(there, key=self._size):
            if (self._capacity.free[node] >= wanted).all():
                break
            moved[job] = self._take(job)
        done = bool((self._capacity.free[node] >= wanted).all())
        settled: list[int] = []
        for job in sorted(moved, key=lambda job: -moved[job].nodes[0][1]):
            place = moved[job]
            if done:
                need, allowed = self._wanted(job, Least(place.shape, 0, 0))
                elsewhere = allowed & (np.arange(len(allowed)) != node)
                nodes = self._capacity.find(need, elsewhere, place.nodes[0][1])
                done = nodes is not None
                if nodes is not None:
                    self._put(job, Place(place.shape, nodes))
                    settled.append(job)
        if not done:
            for job in settled:
                self._take(job)
            for job, place in moved.items():
                self._put(job, place)
        return done

    def _size(self, job: int) -> tuple[int, int]:
        place = self.places[job]
        return int(self._need(job, place).max()) * place.nodes[0][1], job

    def _close(self, job: int, least: Least) -> None:
        """Close the nodes where a job will fit soonest, if more may be closed."""
        if len(self.closed) >= self._most_closed:
            return
        need, allowed = self._wanted(job, least)
        allowed = allowed & (self._joining == 0)
        there = np.where(allowed, num_fitting(need, self._nodes.capacity), 0)
        free = np.minimum(self._capacity.free, there[:, None] * need)
        share = (free[:, need > 0] / need[need > 0]).min(axis=1)
        order = np.lexsort((np.arange(len(there)), -share))
        alone = [node for node in order.tolist() if there[node] >= least.replicas]
        chosen = alone[:1] or list(_until(order, there, least.replicas))
        if chosen and len(self.closed) + len(chosen) <= self._most_closed:
            self.closed.extend(chosen)
            self._open[chosen] = False
            self._still_open.clear()
            self._capacity.forget()


def _until(order: Ints, there: Ints, replicas: int) -> Iterator[int]:
    """Yield nodes in order until they hold all replicas together; none if they never do."""
    reach = np.cumsum(there[order])
    enough = int(np.searchsorted(reach, replicas))
    if enough < len(order):
        yield from order[: enough + 1].tolist()
