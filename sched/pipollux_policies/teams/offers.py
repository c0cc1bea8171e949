"""Distribution of remaining slots to jobs that want more, so that no usable slot is idle."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipollux_policies.allocations.allocation import (
    Allocation,
    as_allocation,
    is_first_choice,
    shape_of,
)
from pipollux_policies.allocations.order import by_safety, name_order
from pipollux_policies.allocations.rules import Allocations, Jobs, Nodes, is_pinned, usable_nodes
from pipollux_policies.jobs.job_info import JobInfo, NodeInfo
from pipollux_policies.placement.first_fit import place_arrival

from .restricted import slots_of
from .shares import whose_turn
from .subcluster import without
from .team import Teams


@dataclass
class Offers:
    """Grows allocations while any job wants the remaining slots; `given` is changed in place.
    `wants` are the slots that the policy would give each job if its group were alone.
    """

    teams: Teams
    jobs: Jobs
    nodes: Nodes
    base: Allocations
    wants: Mapping[Any, int]
    given: dict[Any, Allocation]
    told: Collection[Any] = ()
    """Jobs that stay as they are until their notice is over; others may not crowd them."""
    turns: float | None = None
    """Number of past turns at slots that cannot be divided among teams; None: no turns."""
    _free: dict[Any, NodeInfo] | None = field(default=None, init=False)
    _held_now: Counter[str] | None = field(default=None, init=False)

    def make(self) -> None:
        """Offer the remaining slots: first to teams below their quota, then to all."""
        for may in (self._within_quota, self._within_limits):
            first = self._first_served() if may == self._within_limits else ()
            asked = self._in_turn()
            for name in sorted(asked, key=lambda n: (-self.jobs[n].priority, n not in first)):
                if not self._restore(name, may) and name in first:
                    self._grow(name, may)
            # One replica at a time, so that teams with the least per weight go first.
            while any(self._grow(name, may) for name in self._in_turn()):
                pass

    def _in_turn(self) -> list[Any]:
        held = self._held()

        def order(name: Any) -> tuple[Any, ...]:
            job = self.jobs[name]
            team = self.teams[job.team]
            share = max(held[job.team] - team.quota, 0) / team.weight
            return -job.priority, share, job.team, job.created, name_order(name)

        return sorted((n for n in self.jobs if self._slots(n) < self.wants.get(n, 0)), key=order)

    def _first_served(self) -> Collection[Any]:
        """Return the jobs of the team whose turn it is at slots that cannot be divided.

        If jobs of several teams hold nothing because each team may borrow too little for one
        replica, the teams take turns, except teams that already borrow as much per weight as
        another would then.
        """
        idle = [n for n in self._in_turn() if not self.given[n] and not self._is_pinned(n)]
        if self.turns is None or not idle:
            return ()
        highest = max(self.jobs[name].priority for name in idle)
        by_team: defaultdict[str, set[Any]] = defaultdict(set)
        for name in idle:
            if self.jobs[name].priority == highest and self.jobs[name].preemptible:
                by_team[self.jobs[name].team].add(name)
        if len(by_team) < 2:
            return ()
        held = self._held()
        now, then = {}, {}
        for name, jobs in by_team.items():
            team, need = self.teams[name], min(_least_slots(self.jobs[job]) for job in jobs)
            now[name] = max(held[name] - team.quota, 0) / team.weight
            then[name] = max(held[name] + need - team.quota, 0) / team.weight
        even = {name: self.teams[name].weight for name in now if now[name] < min(then.values())}
        return by_team[whose_turn(self.turns, even)] if even else ()

    def _restore(self, name: Any, may: Callable[[JobInfo, int], bool]) -> bool:
        """Restore a job's allocation if there is room, so that it keeps slots that nobody needs."""
        job, base = self.jobs[name], self.base.get(name, ())
        if not base or self._is_pinned(name):
            return False
        held = as_allocation(job, base, self.nodes)
        known = held.shape is not None and job.most_replicas(held.shape) >= len(held)
        more = slots_of(job, held, self.nodes) - self._slots(name)
        return more > 0 and known and may(job, more) and self._put(name, held)

    def _grow(self, name: Any, may: Callable[[JobInfo, int], bool]) -> bool:
        job, now = self.jobs[name], self.given[name]
        if self._is_pinned(name):
            return False
        free = self._room()
        if not free:
            return False
        if not now:
            first = place_arrival(job, free) or _spread(job, free)
            more = slots_of(job, first, self.nodes)
            return more > 0 and may(job, more) and self._put(name, first)
        shape = shape_of(job, now, self.nodes)
        if len(now) >= job.most_replicas(shape) or not may(job, shape.slots):
            return False
        room = [node for node in by_safety(free) if free[node].num_fitting(shape) > 0]
        # Beside its other replicas first, to use few nodes.
        for node in sorted(room, key=lambda node: node not in now):
            if self._put(name, Allocation([*now, node], shape)):
                return True
        return False

    def _put(self, name: Any, allocation: Allocation) -> bool:
        if not self._fits(name, allocation):
            return False
        self.given[name] = allocation
        self._free = self._held_now = None
        return True

    def _room(self) -> Nodes:
        if self._free is None:
            held = {name: given for name, given in self.given.items() if given}
            left = usable_nodes(without(self.jobs, self.nodes, held))
            self._free = {n: node for n, node in left.items() if node.resources.get("slots", 0)}
        return self._free

    def _slots(self, name: Any) -> int:
        return slots_of(self.jobs[name], self.given.get(name, ()), self.nodes)

    def _held(self) -> Counter[str]:
        if self._held_now is None:
            self._held_now = held_by_team(self.jobs, self.nodes, self.given)
        return Counter(self._held_now)

    def _within_quota(self, job: JobInfo, more: int) -> bool:
        return self._held()[job.team] + more <= self.teams[job.team].quota

    def _within_limits(self, job: JobInfo, more: int) -> bool:
        held = self._held()
        held[job.team] += more
        quota = self.teams[job.team].quota
        if not job.preemptible:
            # Jobs that are not preemptible must stay within the quota: their slots cannot be
            # reclaimed.
            fixed = {n: a for n, a in self.given.items() if not self.jobs[n].preemptible}
            if held_by_team(self.jobs, self.nodes, fixed)[job.team] + more > quota:
                return False
        most = self.teams[job.team].most
        if most is not None and held[job.team] > max(most, held[job.team] - more):
            return False
        capacity = sum(n.resources.get("slots", 0) for n in usable_nodes(self.nodes).values())
        names = held.keys() | self.teams.by_name.keys()
        unlent = sum(max(self.teams[n].kept - held[n], 0) for n in names if n != job.team)
        return held[job.team] <= quota or held.total() + unlent <= capacity

    def _fits(self, name: Any, new: Allocation) -> bool:
        others = {n: a for n, a in self.given.items() if a and n != name}
        usable = usable_nodes(without(self.jobs, self.nodes, others))
        shape = shape_of(self.jobs[name], new, self.nodes)
        for node, count in Counter(new).items():
            if node not in usable or usable[node].num_fitting(shape) < count:
                return False
        if len(set(new)) < 2:
            return True
        taken = {
            node
            for n, a in others.items()
            if len(set(a)) > 1 and (n in self.told or not self._is_pinned(n))
            for node in a
        }
        return not taken & set(new)

    def _is_pinned(self, name: Any) -> bool:
        return is_pinned(self.jobs[name], self.base.get(name, ()), self.nodes)


def _spread(job: JobInfo, free: Nodes) -> Allocation:
    """Place a job's fewest replicas on as few nodes as possible; empty if there is no room."""
    for shape in job.all_shapes:
        if job.least_replicas > job.most_replicas(shape):
            continue
        found: list[Any] = []
        for name in sorted(by_safety(free), key=lambda name: -free[name].num_fitting(shape)):
            if is_first_choice(job, shape, free[name].gpu_type):
                wanted = job.least_replicas - len(found)
                found += [name] * min(free[name].num_fitting(shape), wanted)
        if len(found) == job.least_replicas:
            return Allocation(found, shape)
    return Allocation()


def _least_slots(job: JobInfo) -> int:
    return job.least_replicas * min(shape.slots for shape in job.all_shapes)


def held_by_team(jobs: Jobs, nodes: Nodes, given: Mapping[Any, Sequence[Any]]) -> Counter[str]:
    """Return the slots that each team holds."""
    held: Counter[str] = Counter()
    for name, allocation in given.items():
        held[jobs[name].team] += slots_of(jobs[name], allocation, nodes)
    return held
