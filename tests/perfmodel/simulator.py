"""A pipeline played by events: the oracle of the closed forms and of the time lines.

Machines (devices, boundary copies, network links) do one task at a time. A heap of things to come
drives the clock; after all that happens at one moment, every idle machine picks its next task from
those that wait for it. Nothing here knows a formula or a time line. GPipe: first come first served,
and the turn when all forwards are done. 1F1B: a stage takes a micro-batch in as long as fewer than
K - k are in, else it sends the oldest back. Stages that take turns: all work waits for one machine,
which follows one micro-batch through before it takes the next; by GPipe there, and later back, by
1F1B there and back. Interleaved: a device of several stages looks at all that it will ever do in
two lists, forwards and backwards, and waits for the first of one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Literal, NamedTuple

Kind = Literal["gpipe", "gpipe_in_order", "1f1b", "serial", "serial_1f1b", "interleaved"]
Name = tuple[str, int, int]
"""(phase, stage, micro-batch); a copy's stage is the one that receives."""


class Case(NamedTuple):
    """A pipeline: seconds per stage, and per boundary for `transfer`."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    last_backward: tuple[float, ...]
    transfer: tuple[float, ...]
    num_microbatches: int
    overlapping: bool


class Result(NamedTuple):
    """What happened."""

    spans: dict[Name, tuple[float, float]]
    """Start and end of everything."""
    forward_span: float
    final: tuple[float, ...]
    """When each stage's gradients were final."""
    most_held: tuple[int, ...]
    """Most micro-batches that each stage held at once."""


@dataclass
class Task:
    """Parts done one after the other on one machine, each a name and its seconds."""

    machine: Hashable
    parts: list[tuple[Name, float]]
    done: Callable[[], None]
    rank: int = 0


class Shop:
    """The machines and the clock."""

    def __init__(self, choose: Callable[[list[Task]], Task | None]) -> None:
        self._choose = choose
        self._to_come: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._waiting: dict[Hashable, list[Task]] = defaultdict(list)
        self._busy: set[Hashable] = set()
        self.spans: dict[Name, tuple[float, float]] = {}

    def at(self, time: float, action: Callable[[], None]) -> None:
        heappush(self._to_come, (time, next(self._number), action))

    def queue(self, task: Task) -> None:
        self._waiting[task.machine].append(task)

    def run(self) -> None:
        while self._to_come:
            now = self._to_come[0][0]
            while self._to_come and self._to_come[0][0] == now:
                heappop(self._to_come)[2]()
            for machine, tasks in self._waiting.items():
                if tasks and machine not in self._busy:
                    self._start(tasks, now)
        assert not any(self._waiting.values()), "some tasks never ran"

    def _start(self, tasks: list[Task], now: float) -> None:
        task = self._choose(tasks)
        if task is None:
            return
        tasks.remove(task)
        self._busy.add(task.machine)
        for name, seconds in task.parts:
            self.spans[name] = now, now + seconds
            now += seconds
        self.at(now, partial(self._end, task))

    def _end(self, task: Task) -> None:
        self._busy.remove(task.machine)
        task.done()


def simulate(case: Case, kind: Kind = "gpipe", num_devices: int | None = None) -> Result:
    """Play one forward and backward of all micro-batches; a device per stage unless told."""
    play = _Play(case, kind, num_devices or len(case.forward))
    play.shop.run()
    final = [0.0] * play.num_stages
    forward_span = 0.0
    for (phase, stage, _), (_, end) in play.shop.spans.items():
        if phase == "forward":
            forward_span = max(forward_span, end)
        elif phase == "backward":
            final[stage] = max(final[stage], end)
    return Result(play.shop.spans, forward_span, tuple(final), tuple(play.most_held))


def last_all_reduce(
    final: Sequence[float],
    all_reduce: Sequence[float],
    shared_link: bool,
    last_stage_first: bool = True,
) -> float:
    """Play the all-reduces, each from its `final` on; return when the last one ends.

    `last_stage_first`: which of those that wait for the shared link at one time goes first.
    """
    sign = -1 if last_stage_first else 1
    shop = Shop(lambda tasks: min(tasks, key=lambda task: sign * task.rank))
    for stage, (ready, seconds) in enumerate(zip(final, all_reduce, strict=True)):
        link = "link" if shared_link else stage
        task = Task(link, [(("all_reduce", stage, 0), seconds)], lambda: None, stage)
        shop.at(ready, partial(shop.queue, task))
    shop.run()
    return max(end for _, end in shop.spans.values())


class _Play:
    """Moves micro-batches through a shop."""

    def __init__(self, case: Case, kind: Kind, num_devices: int) -> None:
        self.case = case
        self.one_f_one_b, self.takes_turns = "1f1b" in kind, "serial" in kind
        self.in_order = kind == "gpipe_in_order"
        self.interleaved, self.num_devices = kind == "interleaved", num_devices
        num = case.num_microbatches
        # A round is K micro-batches, or as few more as divide all of them.
        rounds = (size for size in range(min(num, num_devices), num + 1) if num % size == 0)
        self.per_round = next(rounds)
        self.num_stages = len(case.forward)
        self.to_do = [self._lists(device) for device in range(num_devices)]
        self.busy_with = [0] * num_devices
        self.held = [0] * self.num_stages
        self.most_held = [0] * self.num_stages
        self.taken_in = [0] * self.num_stages
        self.through = 0
        self.shop = Shop(self._choose)
        for i in range(case.num_microbatches):
            self.shop.at(0.0, partial(self._arrive, "forward", 0, i))

    def _choose(self, tasks: list[Task]) -> Task | None:
        if self.takes_turns:
            return min(tasks, key=lambda task: task.rank)
        phase, stage, _ = tasks[0].parts[-1][0]
        if self.one_f_one_b and "transfer" not in phase:
            room = self.held[stage] < self.num_stages - stage
            more = self.taken_in[stage] < self.case.num_microbatches
            wanted = "forward" if room and more else "backward"
            tasks = [task for task in tasks if task.parts[-1][0][0] == wanted]
        if self.interleaved and "transfer" not in phase:
            tasks = self._due(tasks, stage % self.num_devices)
        if not tasks:
            return None
        phase, stage, _ = tasks[0].parts[-1][0]
        if phase == "forward":
            self.taken_in[stage] += 1
            self.held[stage] += 1
            self.most_held[stage] = max(self.most_held[stage], self.held[stage])
        return tasks[0]

    def _lists(self, device: int) -> dict[str, list[Name]]:
        """Everything that a device does: by round, then by stage, then by micro-batch."""
        num, devices = self.case.num_microbatches, self.num_devices
        per_round = self.per_round
        every = [(q, i) for q in range(device, self.num_stages, devices) for i in range(num)]
        there = sorted(every, key=lambda item: (item[1] // per_round, item[0], item[1]))
        back = sorted(every, key=lambda item: (item[1] // per_round, -item[0], item[1]))
        return {
            "forward": [("forward", *item) for item in there],
            "backward": [("backward", *item) for item in back],
        }

    def _due(self, tasks: list[Task], device: int) -> list[Task]:
        """The one task that interleaved 1F1B wants next of a device, if it is there."""
        hops, per_round = self.num_devices - 1 - device, self.per_round
        others = self.num_stages // self.num_devices - 1
        lists = self.to_do[device]
        room = self.busy_with[device] <= others * per_round + 2 * hops
        phase = "forward" if room and lists["forward"] else "backward"
        due = [task for task in tasks if task.parts[-1][0] == lists[phase][0]]
        if due:
            lists[phase].pop(0)
            self.busy_with[device] += 1 if phase == "forward" else -1
        return due

    def _arrive(self, phase: str, stage: int, microbatch: int) -> None:
        """A micro-batch stands before a stage, its input still at the neighbour's."""
        neighbour = stage - 1 if phase == "forward" else stage + 1
        work = self._task(phase, stage, microbatch)
        if 0 <= neighbour < self.num_stages:
            seconds = self.case.transfer[min(stage, neighbour)]
            copy = (f"{phase}_transfer", stage, microbatch), seconds
            if self.case.overlapping and not self.takes_turns:
                send = Task((phase, neighbour, stage), [copy], partial(self.shop.queue, work))
                self.shop.queue(send)
                return
            work.parts.insert(0, copy)
        self.shop.queue(work)

    def _task(self, phase: str, stage: int, microbatch: int) -> Task:
        last = microbatch == self.case.num_microbatches - 1
        if phase == "forward":
            seconds, rank = self.case.forward[stage], microbatch
        else:
            seconds = (self.case.last_backward if last else self.case.backward)[stage]
            rank = microbatch if self.one_f_one_b else -microbatch
        return Task(
            "thread" if self.takes_turns else ("device", stage % self.num_devices),
            [((phase, stage, microbatch), seconds)],
            partial(self._done, phase, stage, microbatch),
            rank,
        )

    def _done(self, phase: str, stage: int, microbatch: int) -> None:
        if phase == "backward":
            self.held[stage] -= 1
            if stage > 0:
                self._arrive("backward", stage - 1, microbatch)
        elif stage < self.num_stages - 1:
            self._arrive("forward", stage + 1, microbatch)
        elif self.one_f_one_b or self.interleaved:
            self._arrive("backward", stage, microbatch)
        else:
            self._turn()

    def _turn(self) -> None:
        """Send all back, the last one first or in order, when all are through the last stage."""
        self.through += 1
        if self.through == self.case.num_microbatches:
            every = range(self.case.num_microbatches)
            for i in every if self.in_order else every[::-1]:
                self._arrive("backward", self.num_stages - 1, i)
