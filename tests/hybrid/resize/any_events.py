"""When replicas of a run come, go and die, as seen by one of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pipollux
from pipollux_hybrid.job.context import context
from pipollux_hybrid.job.membership import Membership
from pipollux_hybrid.resize.elastic_membership import elastic_membership
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.hybrid.resize.any_plan import MOST_REPLICAS, Happening, LoopPlace, RunEvent, RunPlan

__all__ = ["RunEvents", "write_once"]

PATIENCE = 120.0
"""Seconds that replicas wait at a place for the next membership."""


class RunEvents:
    """What has happened so far, and what is to happen to this replica.

    Args:
        plan: When what happens.
        folder: Where it is written.
    """

    def __init__(self, plan: RunPlan, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self.name = os.environ.get("NAME") or f"first-{pipollux.replica_rank()}"
        """Of this replica."""
        self.process = f"{self.name}.{context().env.stage}"
        """Of this process."""
        self.late = False
        """Whether the pass under way is the last one of its iteration."""
        self._mine: tuple[str, bool] | None = None
        self._happened: list[Happening] = []
        membership = elastic_membership(context())
        assert membership is not None
        self._watch = membership._watch
        write_once(folder / f"id-{self._watch.replica}", self.name)
        if os.environ.get("DIES", "").endswith(f".{context().env.stage}"):
            threading.Thread(target=self._die_as_joining_replica, daemon=True).start()

    @property
    def membership(self) -> Membership:
        """Who takes part."""
        found = self._watch.membership
        assert found is not None
        return found

    def happen(self, place: LoopPlace) -> None:
        """Have happen what is due at the beginning of an iteration; wait where that says so."""
        waits = place.epoch >= self._plan.epochs
        for number, event in enumerate(self._plan.events):
            found = self._known(number)
            if found is None:
                if not self._is_due(event, place):
                    break
                write_once(self._path(number), self._made(number, event, place).to_json())
                found = self._known(number)
                assert found is not None
            if (found.place, found.member) == (place, self.membership.number):
                waits = waits or event.waits
                self._begin(found)
        deadline = time.monotonic() + PATIENCE
        while waits and self._waits_for() and not self._someone_has_died():
            assert time.monotonic() < deadline, f"{self.name} at {place}: {self._waits_for()}"
            time.sleep(0.002)

    def at(self, point: str) -> None:
        """Die if this is where this replica does."""
        if self._mine is None or self._mine[0] != point:
            return
        if point in ("outside", "syncing") or self.late or not self._mine[1]:
            self._die()

    def forget(self, ended: bool) -> None:
        """Die no more when the training has ended."""
        if ended:
            self._mine = None

    def _is_due(self, event: RunEvent, place: LoopPlace) -> bool:
        if place < event.place or place.epoch >= self._plan.epochs:
            return False
        return not (event.settles and self._missing(self.membership.replicas))

    def _made(self, number: int, event: RunEvent, place: LoopPlace) -> Happening:
        """What is about to happen: the same, whichever replica asks at this place."""
        current = self.membership.replicas
        gone = {x for past in self._happened for x in (*past.leaves, *past.dies)}
        free = [replica for replica in current if replica not in gone]
        names = [x for past in self._happened for x in past.joins]
        coming = sum(self._id(name) not in {*current, *gone} for name in names)
        joins, leaves, dies, points = [], [], [], []
        shape = (0, 0, 0)
        doomed = []
        for i, operation in enumerate(event.operations):
            if operation.kind == "joins":
                name = f"later-{number}-{i}-{operation.point}"
                if operation.point:
                    name += f".{operation.stage}"
                    doomed.append(name)
                elif len(current) + coming + len(joins) < MOST_REPLICAS:
                    joins.append(name)
            elif operation.kind == "reshapes":
                shape = operation.shape
            elif len(free) > 1:
                replica = free.pop(operation.rank % len(free))
                if operation.kind == "leaves":
                    leaves.append(replica)
                else:
                    dies.append(replica)
                    points.append((operation.point, operation.late, operation.stage))
        return Happening(
            place=place,
            member=self.membership.number,
            joins=tuple(joins),
            leaves=tuple(leaves),
            dies=tuple(dies),
            points=tuple(points),
            doomed=tuple(doomed),
            shape=shape,
        )

    def _begin(self, happening: Happening) -> None:
        me = self._watch.replica, context().env.stage
        for replica, (point, late, stage) in zip(happening.dies, happening.points, strict=True):
            if (replica, stage) == me:
                self._mine = point, late
                if point == "forming":
                    threading.Thread(target=self._die_while_forming, daemon=True).start()
        if any(happening.shape) and context().env.rank == 0:
            context().component(Metrics)._proposal = self._allowed(*happening.shape)

    def _allowed(self, samples: int, accum_steps: int, microbatches: int) -> tuple[int, int, int]:
        """Return a shape that the goodput model may propose: for a whole batch at least."""
        at_once = pipollux.num_replicas() * samples
        accum_steps = max(accum_steps, -(-self._plan.batch_size // at_once) - 1)
        fits = at_once * (accum_steps + 1) <= self._plan.max_batch_size
        return (samples, accum_steps, microbatches) if fits else (0, 0, 0)

    def _waits_for(self) -> str:
        """What has yet to come before this replica may go on; empty: nothing."""
        pending = self._watch.pending
        wanted = pending.membership.replicas if pending is not None and pending.formed else ()
        missing = self._missing(self.membership.replicas)
        if missing and not (wanted and not self._missing(wanted)):
            return missing
        for past in self._happened:
            for name in past.doomed:
                there = self._id(name) in wanted and "formed" in name
                if not there and not (self._folder / f"gone-{name}").exists():
                    return f"{name} is not gone"
        return ""

    def _missing(self, replicas: tuple[str, ...]) -> str:
        """Who has yet to join or leave, so that these are those who are to take part."""
        dying = {x for past in self._happened for x in past.dies}
        for past in self._happened:
            for replica in past.leaves:
                if replica in replicas:
                    return f"{replica} has not left"
            for name in past.joins:
                replica = self._id(name)
                left = {x for other in self._happened for x in other.leaves}
                if replica not in {*replicas, *left, *dying}:
                    return f"{name} has not joined"
        return ""

    def _someone_has_died(self) -> bool:
        dead = {path.name.removeprefix("died-") for path in self._folder.glob("died-*")}
        return bool(dead & set(self.membership.replicas))

    def _known(self, number: int) -> Happening | None:
        if number >= len(self._happened):
            try:
                text = self._path(number).read_text()
            except FileNotFoundError:
                return None
            self._happened.append(Happening.from_json(text))
        return self._happened[number]

    def _path(self, number: int) -> Path:
        return self._folder / f"event-{number}"

    def _id(self, name: str) -> str:
        for path in self._folder.glob("id-*"):
            if path.read_text() == name:
                return path.name.removeprefix("id-")
        return ""

    def _die(self) -> NoReturn:
        write_once(self._folder / f"died-{self._watch.replica}", self.name)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def _die_while_forming(self) -> None:
        folder = Path(os.environ["PIPOLLUX_RENDEZVOUS"])
        before = set(folder.glob("follows-*"))
        while not set(folder.glob("follows-*")) - before:
            time.sleep(0.0005)
        if self._mine is not None:
            self._die()

    def _die_as_joining_replica(self) -> None:
        formed = os.environ["DIES"].startswith("formed")
        while not (self._watch.waiting_to_join and not formed):
            pending = self._watch.pending
            if formed and pending is not None and pending.formed:
                break
            time.sleep(0.001)
        self._die()


def write_once(path: Path, text: str) -> None:
    """Write a file as a whole, unless somebody has done so before."""
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    aside.write_text(text)
    with suppress(FileExistsError):
        os.link(aside, path)
    aside.unlink()
