"""Who is promised room now, and where: jobs that are behind, the furthest behind first.

A job that is behind (`completion_time`: it has held slots for less than its part of its life) is to
get the least that it runs on before anybody gets more. Where not all that are behind fit at once, a
sum over jobs would prefer those that take few slots, for ever. So the order is strict:

1. Whoever runs and is still to be left alone keeps its least, where it is.
2. Then the others, by the seconds that they are behind, whatever their width. Each is put on nodes
   as if only pinned jobs and those before it were there: everybody else makes way. Where it does
   not fit although enough is free in all, those before it that are in the way are put elsewhere.
3. For one that does not fit, the node where most of its room is free already is closed: nobody new
   is put there, so that it drains. What was closed is not closed to less: nothing new comes, what
   is there only ends, and another node is chosen only if it has more room. So asking again
   answers the same until the job fits, and nothing need be remembered between two decisions.

As many nodes are closed at once as the part of the cluster that is promised, and at least one.
Of the jobs that wait those before never become more, as all of them fall behind at the same pace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pipollux_sched.policy.pollux.arrays import room

from .configurations import Bools, Instance, Ints, JobOptions, Row
from .floor import Floor

_ATTEMPTS = 8
"""Nodes that are looked at for room to be made on."""


class Behind(NamedTuple):
    """A job that has held less than its part."""

    job: int
    """Index into the instance's jobs."""
    seconds: float
    """For which it should have held its least by now, less those for which it did."""


class Least(NamedTuple):
    """One shape of a job, on as few replicas as it runs on."""

    shape: int
    """Index into the job's shapes."""
    replicas: int
    slots: int


class Place(NamedTuple):
    """Where a job is promised room."""

    shape: int
    row: Row


@dataclass(frozen=True)
class Promises:
    """What is to be kept before anything is gained."""

    places: dict[int, Place] = field(default_factory=dict)
    """By job; all of them fit beside each other and the pinned jobs."""
    closed: tuple[int, ...] = ()
    """Nodes where nobody new is put."""


def least_options(instance: Instance, job: int) -> list[Least]:
    """Return the least that a job runs on in each of its shapes, the one of fewest slots first.

    A shape that fits nowhere just now counts as well: pinned jobs may be in the way.
    """
    options = instance.jobs[job]
    found = [_least(instance, options, number) for number in range(len(options.shapes))]
    return sorted((least for least in found if least is not None), key=lambda least: least.slots)


def _least(instance: Instance, options: JobOptions, number: int) -> Least | None:
    shape = options.shapes[number]
    fewest = max(options.job.min_replicas, 1)
    mine = options.replicas[(options.shape == number) & (options.replicas > 0)]
    if mine.size:
        fewest = int(mine.min())
    else:
        reach = instance.nodes.reach(shape)
        fits_now = bool(reach.size) and int(reach[-1]) >= fewest
        if fits_now or fewest > options.job.most_replicas(shape):
            return None  # there is room, and it is worth nothing
    slots = max(shape.resources.get("slots", shape.num_stages), 1)
    return Least(number, fewest, fewest * slots)


def keep(instance: Instance, behind: Sequence[Behind], part: float) -> Promises:
    """Say where jobs that are behind are promised room.

    Args:
        instance: jobs and nodes.
        behind: the jobs; those that run, and stay, are to be left alone.
        part: of all nodes, how many are closed at most; one always may be.
    """
    if not behind or not instance.nodes.names:
        return Promises()
    running = [entry for entry in behind if instance.jobs[entry.job].base]
    ledger = _Ledger(instance, max(1, int(part * len(instance.nodes.names))))
    for entry in running:
        ledger.hold(entry.job)
    waiting = [entry for entry in behind if not instance.jobs[entry.job].base]
    # Of two that are as far behind the older comes first: so are the jobs of an instance ordered.
    for entry in sorted(waiting, key=lambda entry: (-entry.seconds, entry.job)):
        ledger.promise(entry.job)
    return Promises(ledger.places, tuple(ledger.closed))


class _Ledger:
    """Promises made so far, and what they leave."""

    def __init__(self, instance: Instance, most_closed: int) -> None:
        self._instance = instance
        self._nodes = instance.nodes
        self._floor = Floor(instance.nodes)
        self._open: Bools = np.ones(len(instance.nodes.names), dtype=bool)
        self._most_closed = most_closed
        self._hopeless: set[tuple[bytes, bytes, int]] = set()
        self._newcomers: Ints = np.zeros(len(instance.nodes.names), dtype=np.int64)
        self.places: dict[int, Place] = {}
        self.closed: list[int] = []

    def hold(self, job: int) -> None:
        """Promise a job that runs as much of what it holds as it needs at least."""
        options = self._instance.jobs[job]
        stay = options.stay
        assert stay is not None  # noqa: S101  # it has a base
        shape = int(options.shape[stay])
        least = _least(self._instance, options, shape)
        left = int(options.replicas[stay]) if least is None else least.replicas
        row = []
        for node, count in sorted(options.base, key=lambda entry: -entry[1]):
            if left > 0:
                row.append((node, min(count, left)))
            left -= count
        self._put(job, Place(shape, tuple(sorted(row))))

    def promise(self, job: int) -> None:
        """Promise a job room, or close nodes for it."""
        leasts = least_options(self._instance, job)
        for least in leasts:
            need, allowed = self._wanted(job, least)
            key = need.tobytes(), allowed.tobytes(), least.replicas
            # Room only ever gets less while promises are made.
            if key in self._hopeless:
                continue
            row = self._floor.find(need, allowed, least.replicas)
            if row is None:
                row = self._make_room(need, allowed, least.replicas)
            if row is not None:
                self._put(job, Place(least.shape, row))
                return
            self._hopeless.add(key)
        if leasts:
            self._close(job, leasts[0])

    def _wanted(self, job: int, least: Least) -> tuple[Ints, Bools]:
        shape = self._instance.jobs[job].shapes[least.shape]
        return self._nodes.need(shape), self._nodes.allowed(shape) & self._open

    def _put(self, job: int, place: Place) -> None:
        self._floor.put(place.row, self._need(job, place))
        self.places[job] = place
        self._count_newcomer(job, place, 1)

    def _take(self, job: int) -> Place:
        place = self.places.pop(job)
        self._floor.take(place.row, self._need(job, place))
        self._count_newcomer(job, place, -1)
        return place

    def _count_newcomer(self, job: int, place: Place, sign: int) -> None:
        there = {node for node, _ in self._instance.jobs[job].base}
        for node, _ in place.row:
            self._newcomers[node] += sign * (node not in there)

    def _need(self, job: int, place: Place) -> Ints:
        return self._nodes.need(self._instance.jobs[job].shapes[place.shape])

    def _make_room(self, need: Ints, allowed: Bools, replicas: int) -> Row | None:
        """Put jobs of one node elsewhere, so that replicas fit there; None where that fails."""
        capacity = np.where(allowed, room(need, self._nodes.free), 0)
        possible = np.flatnonzero(capacity >= replicas)
        if not possible.size or (self._floor.free.sum(axis=0) < replicas * need).any():
            return None
        missing = np.maximum(replicas * need - self._floor.free[possible], 0).sum(axis=1)
        for node in possible[np.argsort(missing, kind="stable")][:_ATTEMPTS].tolist():
            if self._clear(node, replicas * need):
                return ((node, replicas),)
        return None

    def _clear(self, node: int, wanted: Ints) -> bool:
        there = [job for job, place in self.places.items() if place.row and place.row[0][0] == node]
        there = [job for job in there if len(self.places[job].row) == 1]
        moved: dict[int, Place] = {}
        for job in sorted(there, key=self._size):
            if (self._floor.free[node] >= wanted).all():
                break
            moved[job] = self._take(job)
        done = bool((self._floor.free[node] >= wanted).all())
        settled: list[int] = []
        for job in sorted(moved, key=lambda job: -moved[job].row[0][1]):
            place = moved[job]
            if done:
                need, allowed = self._wanted(job, Least(place.shape, 0, 0))
                elsewhere = allowed & (np.arange(len(allowed)) != node)
                row = self._floor.find(need, elsewhere, place.row[0][1])
                done = row is not None
                if row is not None:
                    self._put(job, Place(place.shape, row))
                    settled.append(job)
        if not done:
            for job in settled:
                self._take(job)
            for job, place in moved.items():
                self._put(job, place)
        return done

    def _size(self, job: int) -> tuple[int, int]:
        place = self.places[job]
        return int(self._need(job, place).max()) * place.row[0][1], job

    def _close(self, job: int, least: Least) -> None:
        """Let the nodes drain where a job will fit soonest, as far as more may be closed."""
        if len(self.closed) >= self._most_closed:
            return
        need, allowed = self._wanted(job, least)
        allowed = allowed & (self._newcomers == 0)
        there = np.where(allowed, room(need, self._nodes.capacity), 0)
        free = np.minimum(self._floor.free, there[:, None] * need)
        share = (free[:, need > 0] / need[need > 0]).min(axis=1)
        order = np.lexsort((np.arange(len(there)), -share))
        alone = [node for node in order.tolist() if there[node] >= least.replicas]
        chosen = alone[:1] or list(_until(order, there, least.replicas))
        if chosen and len(self.closed) + len(chosen) <= self._most_closed:
            self.closed.extend(chosen)
            self._open[chosen] = False


def _until(order: Ints, there: Ints, replicas: int) -> Iterator[int]:
    """Yield nodes in an order until they hold so many replicas together; none if they never do."""
    reach = np.cumsum(there[order])
    enough = int(np.searchsorted(reach, replicas))
    if enough < len(order):
        yield from order[: enough + 1].tolist()


__all__ = ["Behind", "Least", "Place", "Promises", "keep", "least_options"]
