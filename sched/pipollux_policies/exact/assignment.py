"""Placement of chosen configurations on nodes, without splitting a replica.

The knapsack's choice may not fit: free slots are scattered, a node carries at most one distributed
job, and CPUs or memory may be the limit. So jobs that stay are placed first, then the widest; a job
without room gets the best configuration that fits. If that loses value, the best of three more
arrangements is used: (1) jobs that can be resized in place come before jobs that move; (2) jobs
that were to stay may move; (3) configurations are chosen as if distributed jobs took whole nodes.
Finally every job is offered the remaining room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipollux_policies.placement.node_choice import (
    Bools,
    Floats,
    Ints,
    NodeCapacity,
    NodeCounts,
)

from .configurations import NOTHING, Instance, JobConfigurations
from .level_gains import LevelGains
from .objective import Held, ObjectiveValue
from .reservation import Place

_TOLERANCE = 1e-9


class Placed(NamedTuple):
    """The allocation of one job."""

    shape: int
    """Index into the job's shapes; meaningless for an empty allocation."""
    nodes: NodeCounts
    gain: float


class Assignment:
    """The allocations of all jobs, built job by job; `worth` computes the gains of changes, and
    `at_levels` those at higher network levels, in common for several assignments.
    """

    def __init__(
        self, instance: Instance, worth: ObjectiveValue, gains: Floats, at_levels: LevelGains
    ) -> None:
        self._instance = instance
        self._worth = worth
        self._all_gains = gains
        self._gains = instance.table.split(gains)
        self._topology, self._at_levels = instance.nodes.topology, at_levels
        self.crossed = False
        """Whether a job got its configuration at a network level that costs it more."""
        self._capacity = NodeCapacity(instance.nodes.free, self._topology)
        nothing = gains[instance.table.first[:-1] + NOTHING].tolist()
        self.placed = [Placed(0, (), gain) for gain in nothing]
        self._held: Ints = np.zeros((len(nothing), len(instance.nodes.kinds)), dtype=np.int64)

    @property
    def total(self) -> float:
        """The sum of all gains."""
        return float(sum(placed.gain for placed in self.placed))

    def fill(self, chosen: Ints, *, keep: bool, at_home: bool = False) -> bool:
        """Give jobs their chosen configurations, or the best that fit; return if all got theirs.

        If `keep`, jobs that stay come first; then, if `at_home`, those that can be resized in
        place.
        """
        table = self._instance.table
        configs = table.first[:-1] + chosen
        empty = np.array([not placed.nodes for placed in self.placed], dtype=bool)
        if keep:
            stays = empty & np.isin(configs, table.stay)
            self._leave(np.flatnonzero(stays).tolist())
            empty &= ~stays
        # Jobs that suffer from a higher network level first, then the widest: by nodes, by slots.
        slots = self._instance.need.max(axis=1)[table.shape[configs]] * table.replicas[configs]
        suffers = self._at_levels.suffers[configs] & (table.num_nodes[configs] > 1)
        order = np.lexsort((-slots, -table.num_nodes[configs], ~suffers))
        complete = True
        waiting = order[(empty & (chosen != NOTHING))[order]].tolist()
        for job in waiting:
            self._claim(job, 1)
        if at_home:
            waiting = [job for job in waiting if not self._change_at_home(job, int(chosen[job]))]
        for job in waiting:
            config = int(chosen[job])
            self._claim(job, -1)
            if not self.give(job, config):
                complete = False
                self.upgrade(job)
            elif self._lost_survivors(job, config):
                complete = False
                # Resources beyond the chosen configuration belong to other jobs.
                self.upgrade(job, most=config)
            elif self._level(self.placed[job].nodes) > self._jobs[job].level[config]:
                self.crossed = True
        return complete

    def fill_promised(self, places: Mapping[int, Place], chosen: Ints) -> None:
        """Give jobs their promised places, which fit together, then `fill`."""
        for job, place in places.items():
            self._put(job, Placed(place.shape, place.nodes, self._gain_at(job, place)))
        for job in places:
            least = self.placed[job]
            self._clear(job)
            if chosen[job] == NOTHING or not self.give(job, int(chosen[job])):
                self._put(job, least)
            elif not self.keeps(job):
                self._clear(job)
                self._put(job, least)
        self.fill(chosen, keep=True)

    def keeps(self, job: int) -> bool:
        """Return whether a promise is kept: only broken promises have negative gains."""
        return self.placed[job].gain >= 0

    def stay(self) -> bool:
        """Leave every job where it is; return whether that is possible."""
        table = self._instance.table
        return self._leave(table.job[table.stay].tolist())

    def _leave(self, jobs: Sequence[int]) -> bool:
        instance, table = self._instance, self._instance.table
        mine = np.isin(instance.bases.job, jobs)
        owners, nodes, counts = (part[mine] for part in instance.bases)
        ends = table.first[1:] - 1
        if not self._capacity.put_all(
            owners, nodes, counts, instance.need[table.shape[ends[owners]]]
        ):
            # Try every job, even after one did not fit.
            given = [self.give(job, len(self._gains[job]) - 1) for job in jobs]
            return all(given)
        self._held[jobs] = instance.asked[ends[jobs]]
        for job, gain in zip(jobs, self._all_gains[ends[jobs]].tolist(), strict=True):
            configs = self._jobs[job]
            self.placed[job] = Placed(int(configs.shape[-1]), configs.base, gain)
        return True

    def improve(self) -> None:
        """Offer every job the best configuration that fits, until no job gains."""
        for _ in range(len(self._jobs)):
            upgraded = [self.upgrade(job) for job in self._wanting()]
            if not any(upgraded):
                return

    def give(self, job: int, config: int) -> bool:
        """Give a configuration to a job that holds nothing; return whether it fits."""
        found = self._find(job, config)
        if found is None:
            return False
        self._put(job, found)
        return True

    def upgrade(self, job: int, most: int | None = None) -> bool:
        """Give a job the best configuration that fits; return whether anything changed. `most` is a
        configuration whose resources are the upper limit; None: no limit.
        """
        before = self.placed[job]
        self._clear(job)
        best = before
        gains, fitting = self._gains[job], self._fitting(job)
        first = self._instance.table.first[job]
        if most is not None:
            asked = self._instance.asked[first : first + len(gains)]
            fitting = fitting[(asked[fitting] <= asked[most]).all(axis=1)]
        # The listed gain is for the fewest nodes and the lowest network level; on more nodes, or at
        # a higher level, the gain can only be lower.
        fitting = fitting[gains[fitting] > before.gain]
        gains = gains[fitting]
        if fitting.size and self._at_levels.sensitive[job]:
            gains = self._at_levels.of(first + fitting, self._levels_now(job, fitting))
        for index in np.argsort(-gains, kind="stable").tolist():
            if not _better(float(gains[index]), best.gain):
                break
            found = self._find(job, int(fitting[index]))
            if found is not None and _better(found.gain, best.gain):
                best = found
        self._put(job, best)
        return best is not before

    @property
    def _jobs(self) -> Sequence[JobConfigurations]:
        return self._instance.jobs

    def _wanting(self) -> list[int]:
        table = self._instance.table
        room = self._capacity.free.sum(axis=0) + self._held
        fits = (self._instance.asked <= room[table.job]).all(axis=1)
        now = np.array([placed.gain for placed in self.placed])
        gains = np.where(fits, self._gains_now(fits, now), -np.inf)
        best = np.maximum.reduceat(gains, table.first[:-1])
        margin = _TOLERANCE * np.maximum(np.abs(best), np.abs(now))  # as in `_better`
        wanting: list[int] = np.flatnonzero(best > now + margin).tolist()
        return wanting

    def _gains_now(self, fits: Bools, now: Floats) -> Floats:
        """Return the gain of every configuration at the lowest network level with room for it, if
        it fits at all and could be better than the gain `now`. The room that a job holds itself
        counts as if it were all in one domain.
        """
        table, at_levels = self._instance.table, self._at_levels
        some = at_levels.spread[fits[at_levels.spread]]
        some = some[self._all_gains[some] > now[table.job[some]]]
        if not some.size:
            return self._all_gains
        nodes, jobs = self._instance.nodes, table.job[some]
        rooms = np.stack([self._capacity.rooms(*nodes.wanted(shape)) for shape in table.kinds])
        own = np.zeros(len(now), dtype=np.int64)
        for job in np.unique(jobs).tolist():
            own[job] = sum(count for _, count in self.placed[job].nodes)
        there = rooms[table.kind[table.shape[some]], :-1] + own[jobs, None]
        levels = 1 + (there < table.replicas[some, None]).sum(axis=1)
        stays = np.isin(some, table.stay)
        levels[stays] = table.level[some[stays]]
        gains = self._all_gains.copy()
        gains[some] = at_levels.of(some, levels)
        return gains

    def _levels_now(self, job: int, some: Ints) -> Ints:
        """Return the lowest network level with room for each of some configurations of a job that
        holds nothing, (C,).
        """
        configs, nodes = self._jobs[job], self._instance.nodes
        rooms = np.stack([self._capacity.rooms(*nodes.wanted(shape)) for shape in configs.shapes])
        short = rooms[configs.shape[some], :-1] < configs.replicas[some, None]
        levels: Ints = np.where(configs.num_nodes[some] > 1, 1 + short.sum(axis=1), 1)
        if configs.stay is not None:
            levels[some == configs.stay] = configs.level[configs.stay]
        return levels

    def _fitting(self, job: int) -> Ints:
        """Return the configurations that fit, and always the one to stay."""
        configs, nodes = self._jobs[job], self._instance.nodes
        most = [self._capacity.most(*nodes.wanted(shape)) for shape in configs.shapes]
        fits = configs.replicas <= np.array(most)[configs.shape]
        if configs.stay is not None:
            fits[configs.stay] = True
        return np.flatnonzero(fits)

    def _find(self, job: int, config: int) -> Placed | None:
        configs = self._jobs[job]
        number = int(configs.shape[config])
        need, allowed = self._instance.nodes.wanted(configs.shapes[number])
        if config == configs.stay and self._capacity.accepts(configs.base, need):
            return Placed(number, configs.base, self._gain(job, config, configs.base))
        if config == NOTHING:
            return Placed(number, (), self._gain(job, config, ()))
        replicas = int(configs.replicas[config])
        found = [self._capacity.find(need, allowed, replicas)]
        if configs.elastic[config]:
            held = configs.survivors
            found = [*self._capacity.all_keeping(need, allowed, replicas, held), *found]
        placed = [Placed(number, n, self._gain(job, config, n)) for n in found if n is not None]
        # Of equal gains the first wins: it keeps more survivors.
        return max(placed, key=lambda one: one.gain, default=None)

    def _claim(self, job: int, change: int) -> None:
        """Claim each node where a job lies once per replica, or (-1) release the claims."""
        configs = self._jobs[job]
        for node, count in configs.base or configs.survivors:
            self._capacity.claims[node] += change * count

    def _change_at_home(self, job: int, config: int) -> bool:
        """Resize a job in place if a survivor stays on the fewest nodes; return whether it did."""
        configs = self._jobs[job]
        if not configs.elastic[config]:
            return False
        self._claim(job, -1)
        found = self._find(job, config)
        if (
            found is None
            or len(found.nodes) > configs.num_nodes[config]
            or not configs.keeps_survivor(found.shape, found.nodes)
        ):
            self._claim(job, 1)
            return False
        self._put(job, found)
        return True

    def _lost_survivors(self, job: int, config: int) -> bool:
        configs, placed = self._jobs[job], self.placed[job]
        return bool(configs.elastic[config]) and not configs.keeps_survivor(
            placed.shape, placed.nodes
        )

    def _gain(self, job: int, config: int, nodes: NodeCounts) -> float:
        configs = self._jobs[job]
        stays = configs.stay is not None and nodes == configs.base
        if stays and configs.shape[config] == configs.shape[configs.stay]:
            return float(self._gains[job][configs.stay])
        as_listed = not configs.elastic[config] or configs.keeps_survivor(
            int(configs.shape[config]), nodes
        )
        as_listed &= self._level(nodes) <= configs.level[config]
        if config != configs.stay and len(nodes) == configs.num_nodes[config] and as_listed:
            return float(self._gains[job][config])
        if config == NOTHING:
            return float(self._gains[job][NOTHING])
        return self._gain_moved(job, int(configs.shape[config]), nodes)

    def _gain_at(self, job: int, place: Place) -> float:
        configs = self._jobs[job]
        stay = configs.stay
        if stay is not None and place == (configs.shape[stay], configs.base):
            return float(self._gains[job][stay])
        return self._gain_moved(job, place.shape, place.nodes)

    def _gain_moved(self, job: int, shape: int, nodes: NodeCounts) -> float:
        replicas, level = sum(count for _, count in nodes), self._level(nodes)
        if level > 1:
            self._at_levels.need()
        speedup_fn = self._jobs[job].shapes[shape].speedup_at(level)
        speedup = float(speedup_fn(len(nodes), replicas))
        elastic = self._jobs[job].keeps_survivor(shape, nodes)
        return self._worth.moved(job, speedup, Held(shape, replicas), elastic=elastic)

    def _level(self, nodes: NodeCounts) -> int:
        return self._topology.level(node for node, _ in nodes) if len(nodes) > 1 else 1

    def _put(self, job: int, placed: Placed) -> None:
        if placed.nodes:
            need = self._need(job, placed)
            self._capacity.put(placed.nodes, need)
            self._held[job] = sum(count for _, count in placed.nodes) * need
        self.placed[job] = placed

    def _clear(self, job: int) -> None:
        placed = self.placed[job]
        if placed.nodes:
            self._capacity.take(placed.nodes, self._need(job, placed))
            self._held[job] = 0

    def _need(self, job: int, placed: Placed) -> Ints:
        return self._instance.nodes.need(self._jobs[job].shapes[placed.shape])


def _better(gain: float, than: float) -> bool:
    return gain > than + _TOLERANCE * max(abs(gain), abs(than))
