"""From chosen options to nodes: jobs stay where they are, no replica is split, mixed K are packed.

What the knapsack chose need not fit: free slots lie scattered, a node carries one distributed job
at most, and CPUs or memory may bind. So jobs that stay are put down first, then the others, the
widest first; whoever finds no room takes the best option that there is room for. Where that loses
something, two more arrangements are tried: one in which jobs that were to stay may move within
their option, one of options chosen anew as if distributed jobs took whole nodes; the best counts.
At last every job is offered what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .configurations import NOTHING, Floats, Instance, Ints, JobOptions, Row
from .floor import Floor
from .objective import Worth
from .promise import Place

_TOLERANCE = 1e-9


class Placed(NamedTuple):
    """What one job is given."""

    shape: int
    """Index into its shapes; of no meaning where it gets nothing."""
    row: Row
    gain: float


class Assignment:
    """All jobs on the floor.

    Args:
        instance: jobs and nodes.
        worth: what options are worth.
        gains: `worth.gains` of every job.
    """

    def __init__(self, instance: Instance, worth: Worth, gains: Sequence[Floats]) -> None:
        self._instance = instance
        self._worth = worth
        self._gains = gains
        self.floor = Floor(instance.nodes)
        self.placed = [Placed(0, (), float(gain[NOTHING])) for gain in gains]

    @property
    def total(self) -> float:
        """The sum of all gains."""
        return float(sum(placed.gain for placed in self.placed))

    def fill(self, chosen: Sequence[int], *, keep: bool) -> bool:
        """Give every job its chosen option, or the best that there is room for.

        Args:
            chosen: an option of every job.
            keep: whether jobs that are to stay are put down before all others.

        Returns:
            Whether every job got what was chosen for it.
        """
        stays = [options.stay == pick for options, pick in zip(self._jobs, chosen, strict=True)]
        empty = [job for job in range(len(self._jobs)) if not self.placed[job].row]
        if keep:
            for job in empty:
                if stays[job]:
                    self.give(job, chosen[job])
        rest = [job for job in empty if not (keep and stays[job])]
        complete = True
        for job in sorted(rest, key=lambda j: self._width(j, chosen[j])):
            if chosen[job] != NOTHING and not self.give(job, chosen[job]):
                complete = False
                self.upgrade(job)
        return complete

    def fill_promised(self, places: Mapping[int, Place], chosen: Sequence[int]) -> None:
        """Give jobs what they are promised, then fill up as `fill` does.

        Args:
            places: where each of them has room, all of them beside each other.
            chosen: an option of every job.
        """
        for job, place in places.items():
            self._put(job, Placed(place.shape, place.row, self._gain_at(job, place)))
        for job in places:
            least = self.placed[job]
            self._clear(job)
            if chosen[job] == NOTHING or not self.give(job, chosen[job]):
                self._put(job, least)
        self.fill(chosen, keep=True)

    def stay(self) -> bool:
        """Leave every job where it is; tells whether that is possible at all."""
        return all(options.stay is None or self.give(j, options.stay) for j, options in self._all())

    def improve(self) -> None:
        """Offer every job the best that there is room for, until nobody wants anything."""
        for _ in range(len(self._jobs)):
            upgraded = [self.upgrade(job) for job in self._wanting()]
            if not any(upgraded):
                return

    def give(self, job: int, option: int) -> bool:
        """Give a job that holds nothing an option; tells whether there was room."""
        found = self._find(job, option)
        if found is None:
            return False
        self._put(job, found)
        return True

    def upgrade(self, job: int) -> bool:
        """Give a job the best option that there is room for; tells whether anything changed."""
        before = self.placed[job]
        self._clear(job)
        best = before
        gains = self._gains[job]
        fitting = self._fitting(job)
        for option in fitting[np.argsort(-gains[fitting], kind="stable")].tolist():
            # On more nodes than the fewest an option is worth less than it says, not more.
            if not _better(float(gains[option]), best.gain):
                break
            found = self._find(job, option)
            if found is not None and _better(found.gain, best.gain):
                best = found
        self._put(job, best)
        return best is not before

    @property
    def _jobs(self) -> Sequence[JobOptions]:
        return self._instance.jobs

    def _all(self) -> list[tuple[int, JobOptions]]:
        return list(enumerate(self._jobs))

    def _wanting(self) -> list[int]:
        """Return the jobs that gain by an option that all that is free, together, allows."""
        free = self.floor.free.sum(axis=0)
        return [job for job, options in self._all() if self._wants(job, options, free)]

    def _wants(self, job: int, options: JobOptions, free: Ints) -> bool:
        placed = self.placed[job]
        needs = np.stack([self._instance.nodes.need(shape) for shape in options.shapes])
        held = sum(count for _, count in placed.row) * needs[placed.shape]
        asked = options.replicas[:, None] * needs[options.shape]
        fits = (asked <= free + held).all(axis=1)
        return _better(float(self._gains[job][fits].max(initial=-np.inf)), placed.gain)

    def _fitting(self, job: int) -> Ints:
        """Return the options that there is room for, and the one to stay, room or not."""
        options, nodes = self._jobs[job], self._instance.nodes
        most = [self.floor.most(nodes.need(s), nodes.allowed(s)) for s in options.shapes]
        fits = options.replicas <= np.array(most)[options.shape]
        if options.stay is not None:
            fits[options.stay] = True
        return np.flatnonzero(fits)

    def _width(self, job: int, option: int) -> tuple[int, int, int]:
        """Sort key: jobs on most nodes first, then those with the largest replicas and most."""
        options = self._jobs[job]
        shape = options.shapes[options.shape[option]]
        slots = int(self._instance.nodes.need(shape).max())
        replicas = int(options.replicas[option])
        return -int(options.num_nodes[option]), -slots * replicas, job

    def _find(self, job: int, option: int) -> Placed | None:
        options, nodes = self._jobs[job], self._instance.nodes
        number = int(options.shape[option])
        shape = options.shapes[number]
        need = nodes.need(shape)
        row: Row | None = ()
        if option == options.stay and self.floor.accepts(options.base, need):
            row = options.base
        elif option != NOTHING:
            row = self.floor.find(need, nodes.allowed(shape), int(options.replicas[option]))
        return None if row is None else Placed(number, row, self._gain(job, option, row))

    def _gain(self, job: int, option: int, row: Row) -> float:
        options = self._jobs[job]
        stays = options.stay is not None and row == options.base
        if stays and options.shape[option] == options.shape[options.stay]:
            return float(self._gains[job][options.stay])
        if option != options.stay and len(row) == options.num_nodes[option]:
            return float(self._gains[job][option])
        if option == NOTHING:
            return float(self._gains[job][NOTHING])
        return self._gain_moved(job, int(options.shape[option]), row)

    def _gain_at(self, job: int, place: Place) -> float:
        options = self._jobs[job]
        stay = options.stay
        if stay is not None and (place.row, place.shape) == (options.base, options.shape[stay]):
            return float(self._gains[job][stay])
        return self._gain_moved(job, place.shape, place.row)

    def _gain_moved(self, job: int, shape: int, row: Row) -> float:
        replicas = sum(count for _, count in row)
        speedup = float(self._jobs[job].shapes[shape].speedup_fn(len(row), replicas))
        return self._worth.moved(job, speedup)

    def _put(self, job: int, placed: Placed) -> None:
        if placed.row:
            self.floor.put(placed.row, self._need(job, placed))
        self.placed[job] = placed

    def _clear(self, job: int) -> None:
        placed = self.placed[job]
        if placed.row:
            self.floor.take(placed.row, self._need(job, placed))

    def _need(self, job: int, placed: Placed) -> Ints:
        return self._instance.nodes.need(self._jobs[job].shapes[placed.shape])


def _better(gain: float, than: float) -> bool:
    return gain > than + _TOLERANCE * max(abs(gain), abs(than))
