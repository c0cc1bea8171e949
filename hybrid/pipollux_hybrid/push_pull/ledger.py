"""The ledger of samples: which replica trains on which, each exactly once in every layer.

A replica takes *leases* on positions of the epoch's order, and trains on them. Its pushes credit
them layer by layer. Where a replica is lost, the layers' credits say what became of its leases:
positions that some layer is still to be trained on are leased to others, which leave out the layers
that have them already::

    position   0 ··· 63   64 ··· 127  128 ··· 191
    layer 0    credited   credited     -             lost while it had pushed layer 0 only
    layer 1    credited    -           -
               done       skip (0,)   skip ()        leased again

With ``max_staleness=0`` all replicas take as many steps per round, and their leases are *stripes*:
a function of the replicas' ids, so that a training can be repeated. Otherwise a replica gets the
first free positions.

As in :mod:`~pipollux_hybrid.push_pull.key_range`, operations are deterministic.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .intervals import IntervalSet
from .key_range import FENCED, Place, RejectedError

Credits = Mapping[int, Iterable[Sequence[int]]]
"""Credited positions of the loop, by layer; layers that are beyond the loop are missing."""
SHARE = 0.05
"""Share of the time that communication may take with ``sync_every="auto"``."""
AS_FAST = 0.8
"""Ratio to the fastest replica's speed from which a replica takes as many steps."""
NUMBERS = 1_000_000
"""Distance between the members' numbers of two generations, more than join in one."""
REPLICA = 10**12
"""Distance between the members' numbers of two replicas, more than ever join."""
UNKNOWN = -1
"""Number of samples of a loop of which only the number was saved."""
ANSWERS = 256
"""Answers that are kept for the other processes of a replica."""


@dataclass(frozen=True)
class Lease:
    """Positions from ``start`` to before ``stop``, for one replica."""

    start: int
    stop: int
    skip: tuple[int, ...] = ()
    """Layers that have been trained on them."""


@dataclass
class Member:
    """A replica."""

    replica: int
    processes: int
    node: str = ""
    """Name of its host."""
    fragments: list[list[int]] = field(default_factory=list)
    """Layers that it pushes together."""
    place: Place | None = None
    """The loop that all of its processes have reached."""
    opened: set[int] = field(default_factory=set)
    """Those of its processes that have reached the next one."""
    counted: bool = False
    asked: set[int] = field(default_factory=set)
    """Its processes that wait for leases, and have pushed everything."""
    leases: list[Lease] = field(default_factory=list)
    reserved: list[Lease] = field(default_factory=list)
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    step_time: float = 0.0
    """Seconds of a step; 0: not measured."""
    sync_time: float = 0.0
    """Seconds that the pushes and pulls of a round take."""
    batch: int = 1
    """Samples of a step."""

    @property
    def idle(self) -> bool:
        """Whether all of its processes wait for leases."""
        return len(self.asked) == self.processes


class Ledger:
    """The leases of a job; one of its servers has it.

    Args:
        sync_every: H; None: chosen by the members' measured times.
        lockstep: Whether leases are stripes.
        adapts: Whether slow replicas take fewer steps.
    """

    def __init__(self, sync_every: int | None, *, lockstep: bool, adapts: bool) -> None:
        self.sync_every, self.lockstep, self.adapts = sync_every, lockstep, adapts
        self.num_layers = 0
        self.members: dict[int, Member] = {}
        self.settings: dict[str, Any] = {}
        """What members have to have alike, as the first of them had it."""
        self.next_member = 1
        self.place: Place | None = None
        self.begun = False
        """Whether the members have reached the loop at ``place``."""
        self.num_samples = 0
        self.data = ""
        """Description of the loop's data."""
        self.before: tuple[Place, int] | None = None
        """The loop before and its samples; None: it is the first one of the servers."""
        self.done: dict[int, IntervalSet] = {}
        self.free: list[Lease] = []

    def join(
        self,
        replica: int,
        processes: int,
        num_layers: int,
        node: str = "",
        fragments: Sequence[Sequence[int]] = (),
    ) -> int:
        """Return the number of a new member: changes are added in the order of the replicas."""
        number = replica * REPLICA + self.next_member
        self.next_member += 1
        self.members[number] = Member(replica, processes, node, [list(x) for x in fragments])
        self.num_layers = num_layers
        return number

    def open(
        self, number: int, stage: int, place: Place, num_samples: int, batch: int, data: str
    ) -> Place:
        """Note that a process of a member has reached a loop, with the samples of its first steps
        and a description of the data; return the place of the job, which is later if the loop is
        over.

        Raises:
            RejectedError: The member is fenced.
            ValueError: The member skips a loop, or has other data.
        """
        member = self._member(number)
        if self.place is None or (place > self.place and self.is_over()):
            if self.place is not None:
                self.before = self.place, self.num_samples
            self.place, self.begun = place, False
            self.num_samples, self.data = num_samples, data
        if place == self.place and self.num_samples == UNKNOWN:
            self.num_samples, self.data = num_samples, data
        if place > self.place:
            raise ValueError(
                f"replica {member.replica} begins loop {place[1]} of epoch {place[0]}, and loop "
                f"{self.place[1]} of epoch {self.place[0]} is not over on the servers: they were "
                "restored from an earlier state; restart the replicas, which then continue there"
            )
        if place == self.place and data != self.data:
            raise ValueError(
                f"replica {member.replica} trains on {data}, and others on {self.data}: all "
                "replicas need the same data in the same order"
            )
        member.batch = batch
        if member.place != place:
            member.opened.add(stage)
            if len(member.opened) == member.processes:
                member.place, member.asked = place, set()
                member.opened = set()
        return self.place

    def earlier_place(self, reached: Mapping[int, tuple[Place, int]]) -> Place | None:
        """Return the loop from which the training has to go on, as some layers were saved before
        they had all of its samples, and the ledger later; None: there are no such layers.

        Args:
            reached: Of each layer, its loop and the number of samples that are credited in it.
        """
        if self.place is None or self.before is None:
            return None
        behind = [
            place
            for place, count in reached.values()
            if place < self.place and (place, count) != self.before
        ]
        return min(behind, default=None)

    def go_back(self, place: Place) -> None:
        """Begin a loop again, with the members that will join."""
        self.members, self.place, self.begun, self.before = {}, place, False, None
        self.num_samples, self.data, self.free = UNKNOWN, "", []
        self.done = {layer: IntervalSet() for layer in range(self.num_layers)}

    def may_begin(self, expected: int) -> bool:
        """Return whether enough members have reached the loop."""
        here = [member.place == self.place for member in self.members.values()]
        return not self.begun and self.place is not None and len(here) >= expected and all(here)

    def begin(self, credited: Credits) -> dict[int, bool]:
        """Begin the loop with what is credited already; return the members to count in rounds."""
        self.rebuild(credited)
        self.begun = True
        return self._count([n for n, member in self.members.items() if member.place == self.place])

    def measure(self, number: int, batch: int, step_time: float, sync_time: float) -> None:
        """Note a member's batch size and times."""
        member = self._member(number)
        member.batch = batch
        if step_time > 0.0:
            member.step_time = step_time
        if sync_time > 0.0:
            member.sync_time = sync_time

    def answer(self, number: int, turn: int, stage: int, *, idle: bool) -> dict[str, Any] | None:
        """Return the answer to a member's request number ``turn``, the same to all of its
        processes; None: not known yet.

        It has the status ``"leased"``, with positions and the steps per round; ``"none"``, if the
        member has leases to train on; or ``"over"``. With ``idle`` the member has pushed
        everything, and there is an answer only once there are positions, or the loop is over.
        """
        member = self._member(number)
        if turn in member.answers:
            return member.answers[turn]
        if self._has_passed(member, stage):
            return member.answers.setdefault(turn, {"status": "over" if idle else "none"})
        if not self.begun:
            return None
        if idle:
            member.asked.add(stage)
            if not member.idle:
                return None
        lease = self._next(number)
        if lease is not None:
            member.leases.append(lease)
            span = [lease.start, lease.stop]
            found: dict[str, Any] = {"status": "leased", "span": span, "skip": list(lease.skip)}
            found["steps"] = self.steps_of(number)
            found |= self.present()
        elif not idle:
            found = {"status": "none"}
        elif self.is_over() and not any(other.counted for other in self.members.values()):
            found = {"status": "over"}
        else:
            return None
        member.answers[turn] = found
        member.answers.pop(turn - ANSWERS, None)
        if found["status"] == "leased":
            member.asked = set()
        return found

    def _has_passed(self, member: Member, stage: int) -> bool:
        """Return whether others have begun the loop after the one that a member's process is in:
        it has nothing to wait for there, and they wait for it.
        """
        if self.place is None or member.place is None or stage in member.opened:
            return False
        return member.place < self.place

    def busy(self) -> set[int]:
        """Return the members for which the beginning or the end of the loop waits."""
        if not self.begun:
            return {n for n, member in self.members.items() if member.place != self.place}
        return {n for n, member in self.members.items() if not member.idle}

    def present(self) -> dict[str, Any]:
        """Return the ids of the members' replicas, and the number of their nodes."""
        replicas = sorted({member.replica for member in self.members.values()})
        nodes = {member.node or str(member.replica) for member in self.members.values()}
        return {"replicas": replicas, "nodes": len(nodes)}

    def recount(self) -> dict[int, bool]:
        """Return the members that have become idle, or stopped being it."""
        idle = [n for n, member in self.members.items() if member.counted and member.idle]
        busy = [
            n for n, m in self.members.items() if not m.counted and not m.idle and m.leases != []
        ]
        return self._count(busy) | self._count(idle, counted=False) if self.begun else {}

    def complete(self, layers: Iterable[int], intervals: Iterable[Sequence[int]]) -> None:
        """Note that layers have been trained on positions."""
        spans = [(int(start), int(stop)) for start, stop in intervals]
        for layer in layers:
            for start, stop in spans:
                self.done[layer].add(start, stop)

    def lose(self, number: int, credited: Credits) -> None:
        """Remove a member, and free what its leases have not credited."""
        lost = self.members.pop(number, None)
        if lost is None or not self.begun:
            return
        for layer in self.done:
            self.complete([layer], self._spans(credited, layer))
        returned = [part for x in [*lost.leases, *lost.reserved] for part in self._uncredited(x)]
        self.free = [*returned, *self.free]

    def rebuild(self, credited: Credits) -> None:
        """Free all that is not credited: nobody has leases."""
        for member in self.members.values():
            member.leases, member.reserved = [], []
        self.done = {n: IntervalSet(self._spans(credited, n)) for n in range(self.num_layers)}
        self.free = self._uncredited(Lease(0, self.num_samples))

    def _spans(self, credited: Credits, layer: int) -> list[tuple[int, int]]:
        whole = [(0, self.num_samples)]
        return [(int(start), int(stop)) for start, stop in credited.get(layer, whole)]

    def is_over(self) -> bool:
        """Return whether every layer has been trained on all samples of the loop."""
        if self.place is None:
            return True
        return all(len(done) == self.num_samples for done in self.done.values())

    def steps_of(self, number: int) -> int:
        """Return the steps per round of a member: H, or fewer for a slow one (DyLU, arXiv
        2401.09135).
        """
        member = self.members[number]
        steps = self.sync_every or self._affordable()
        times = [x.step_time / x.batch for x in self.members.values() if x.step_time > 0.0]
        if not self.adapts or not times or not member.step_time:
            return steps
        speed = min(times) / (member.step_time / member.batch)
        return steps if speed >= AS_FAST else max(1, int(speed * steps))

    def _affordable(self) -> int:
        ratios = [x.sync_time / x.step_time for x in self.members.values() if x.step_time > 0.0]
        return max([1, *(-int(-ratio // SHARE) for ratio in ratios)])

    def _member(self, number: int) -> Member:
        if number not in self.members:
            raise RejectedError(FENCED)
        return self.members[number]

    def _count(self, numbers: Iterable[int], *, counted: bool = True) -> dict[int, bool]:
        changed = {n: counted for n in numbers if self.members[n].counted != counted}
        for number in changed:
            self.members[number].counted = counted
        return changed

    def _next(self, number: int) -> Lease | None:
        member = self.members[number]
        if not member.reserved and self.lockstep and member.counted:
            self._stripe()
        if member.reserved:
            return member.reserved.pop(0)
        return self._take(self.steps_of(number) * member.batch)

    def _stripe(self) -> None:
        """Reserve the next positions for a round of all counted members."""
        counted = [(m.replica, n) for n, m in self.members.items() if m.counted]
        sizes = {n: self.steps_of(n) * self.members[n].batch for _, n in sorted(counted)}
        if not self.free or self.free[0].skip:
            return
        there, wanted = self.free[0].stop - self.free[0].start, sum(sizes.values())
        given = 0
        for index, (number, size) in enumerate(sizes.items(), start=1):
            if there < wanted:  # the end of the epoch, in proportion
                size = there * sum(list(sizes.values())[:index]) // wanted - given
                if index < len(sizes) and 1 in (size, there - given - size):
                    # Batch normalization needs two samples: none has one of them.
                    size = 0 if size == 1 else size + 1
            given += size
            lease = self._take(size) if size else None
            if lease is not None:
                self.members[number].reserved.append(lease)

    def _take(self, count: int) -> Lease | None:
        """Return the first free positions, at most ``count`` of them."""
        if not self.free:
            return None
        first = self.free.pop(0)
        if first.stop - first.start > count:
            self.free.insert(0, Lease(first.start + count, first.stop, first.skip))
            first = Lease(first.start, first.start + count, first.skip)
        return first

    def _uncredited(self, lease: Lease) -> list[Lease]:
        """Return the parts of a lease that some layer has still to be trained on."""
        holes = {n: list(done.missing(lease.start, lease.stop)) for n, done in self.done.items()}
        edges = sorted({x for spans in holes.values() for span in spans for x in span})
        found = []
        for start, stop in itertools.pairwise(edges):
            having = [
                layer
                for layer, spans in holes.items()
                if not any(hole.start <= start and stop <= hole.stop for hole in spans)
            ]
            if len(having) < self.num_layers:
                found.append(Lease(start, stop, tuple(having)))
        return found

    def restored(self) -> Ledger:
        """Return the ledger of the next generation, without members."""
        self.members, self.begun = {}, False
        self.next_member += NUMBERS
        return self

    def with_options_of(self, other: Ledger) -> Ledger:
        """Return this ledger with another one's options."""
        self.sync_every, self.lockstep, self.adapts = other.sync_every, other.lockstep, other.adapts
        return self

    def content(self) -> dict[str, Any]:
        """Return the state as a JSON object."""
        members = {
            n: {
                **vars(m),
                "asked": sorted(m.asked),
                "opened": sorted(m.opened),
                "leases": [_listed(x) for x in m.leases],
                "reserved": [_listed(x) for x in m.reserved],
            }
            for n, m in self.members.items()
        }
        done = {layer: [list(span) for span in spans] for layer, spans in self.done.items()}
        own = ("sync_every", "lockstep", "adapts", "num_layers", "next_member", "begun")
        return {
            **{name: getattr(self, name) for name in own},
            "num_samples": self.num_samples,
            "data": self.data,
            "place": self.place,
            "before": self.before,
            "members": members,
            "settings": self.settings,
            "done": done,
            "free": [_listed(x) for x in self.free],
        }

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Ledger:
        """Return the ledger of a :meth:`content`, also after a passage through JSON."""
        ledger = cls(content["sync_every"], lockstep=content["lockstep"], adapts=content["adapts"])
        for name in ("num_layers", "next_member", "begun", "num_samples", "data", "settings"):
            setattr(ledger, name, content[name])
        ledger.place = _place(content["place"])
        if content["before"] is not None:
            place, count = content["before"]
            ledger.before = (int(place[0]), int(place[1])), int(count)
        ledger.done = {int(layer): IntervalSet(spans) for layer, spans in content["done"].items()}
        ledger.free = [_lease(x) for x in content["free"]]
        for number, given in content["members"].items():
            member = Member(given["replica"], given["processes"], given["node"], given["fragments"])
            for name in ("counted", "step_time", "sync_time", "batch"):
                setattr(member, name, given[name])
            member.place = _place(given["place"])
            member.asked, member.opened = set(given["asked"]), set(given["opened"])
            member.leases = [_lease(x) for x in given["leases"]]
            member.reserved = [_lease(x) for x in given["reserved"]]
            member.answers = {int(turn): found for turn, found in given["answers"].items()}
            ledger.members[int(number)] = member
        return ledger


def replica_of(member: int) -> int:
    """Return the id of a member's replica."""
    return member // REPLICA


def _listed(lease: Lease) -> list[Any]:
    return [lease.start, lease.stop, list(lease.skip)]


def _lease(given: Sequence[Any]) -> Lease:
    return Lease(int(given[0]), int(given[1]), tuple(given[2]))


def _place(given: Sequence[int] | None) -> Place | None:
    return None if given is None else (int(given[0]), int(given[1]))
