"""Timelines of a pipeline: the work of each stage on each micro-batch, for three schedules.

GPipe (Huang et al., NeurIPS'19): micro-batch i enters stage k as soon as it has left stage k - 1
and stage k is done with micro-batch i - 1. After the last forward, backwards run through the stages
in reverse, last micro-batch first. For K = 3 stages, M = 4 micro-batches, equal times:

    stage 0   F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0
    stage 1   .. F0 F1 F2 F3 .. .. B3 B2 B1 B0 ..
    stage 2   .. .. F0 F1 F2 F3 B3 B2 B1 B0 .. ..

The dots are the bubble, (K - 1)/(M + K - 1) of the total, Σf + (M - 1)·max f + Σg + (M - 1)·max g,
the `T_pipe` of `step_time` at ω = 1. torch's GPipe, in a multi-process pipeline, runs backwards in
the order of the forwards, which takes equally long unless the last micro-batch's is cheaper.

1F1B (PipeDream-Flush, Narayanan et al., ICML'21): stage k runs min(M, K - 1 - k) warm-up forwards,
then alternates one forward and one backward, then runs the remaining backwards, with micro-batches
in the same order in both. Stage k holds min(M, K - k) micro-batches at once, GPipe M:

    stage 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    stage 1   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    stage 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

Interleaved 1F1B (Narayanan et al., SC'21) has V stages on each of K devices (`device_order`). The
bubble is V times shorter, (K - 1)/(V·M) of the ideal with equal stages and K dividing M; in
exchange more copies are sent and more micro-batches held.

A boundary copy moves activations from stage k to k + 1, and their gradients back. It is a separate
machine per direction, or occupies the receiving device immediately before its work on the data.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from .device_order import Phase, Work, device_order
from .params import SCHEDULES, ScheduleKind

TransferPhase = Literal["forward_transfer", "backward_transfer"]


class StageEvent(NamedTuple):
    """One forward or backward of a micro-batch in a stage, or a copy to that stage; in seconds."""

    stage: int
    microbatch: int
    phase: Phase | TransferPhase
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """The ideal timeline of one forward and backward of all micro-batches; for reports and tests.

    Raises ValueError for an unknown kind, a wrong number of entries, a negative or infinite time,
    no micro-batch, or stages that cannot be interleaved.

    >>> schedule = Schedule("1f1b", (1.0, 1.0), (2.0, 2.0), num_microbatches=4)
    >>> schedule.makespan, schedule.max_in_flight
    (15.0, (2, 1))
    >>> schedule.events[0]
    StageEvent(stage=0, microbatch=0, phase='forward', start=0.0, end=1.0)
    """

    kind: ScheduleKind
    forward: tuple[float, ...]
    """Seconds of one micro-batch's forward per stage; K entries, K·V if interleaved."""
    backward: tuple[float, ...]
    """Seconds of one micro-batch's backward per stage, including recomputation; as many."""
    num_microbatches: int
    last_backward: tuple[float, ...] = ()
    """Backward of the last micro-batch in forward order, which checkpointing "except_last" does not
    recompute: GPipe's first backward, 1F1B's last. () = as `backward`."""
    transfer: tuple[float, ...] = ()
    """Seconds of the copy k → k + 1 and of its gradient back; one fewer, or () = free."""
    transfers_overlap: bool = True
    """True: a copy is a separate machine; False: it occupies the receiving device."""
    stages_per_device: int = 1

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "last_backward", "transfer"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check(self)
        object.__setattr__(self, "last_backward", self.last_backward or self.backward)
        object.__setattr__(self, "transfer", self.transfer or (0.0,) * (self.num_stages - 1))

    @property
    def num_stages(self) -> int:
        """K, or K·V if interleaved."""
        return len(self.forward)

    @property
    def num_devices(self) -> int:
        """K; stage q is on device q mod K."""
        return self.num_stages // self.stages_per_device

    @property
    def events(self) -> list[StageEvent]:
        """The forwards and backwards of every stage, sorted by start; the first starts at 0."""
        return list(self._time_line[0])

    @property
    def transfers(self) -> list[StageEvent]:
        """The copies over every boundary, sorted by start; of zero seconds if copies are free."""
        return list(self._time_line[1])

    @property
    def makespan(self) -> float:
        """Seconds from the first forward's start to the last backward's end."""
        return max(self.final_times)

    @property
    def bubble_fraction(self) -> float:
        """The share of the devices' time without compute; copies are not compute."""
        events = (e._replace(stage=e.stage % self.num_devices) for e in self._time_line[0])
        return bubble_fraction(events, self.num_devices)

    @cached_property
    def final_times(self) -> tuple[float, ...]:
        """Seconds until the gradients of each stage are final: the end of its last backward."""
        final = [0.0] * self.num_stages
        for event in self._time_line[0]:
            final[event.stage] = max(final[event.stage], event.end)
        return tuple(final)

    @property
    def max_in_flight(self) -> tuple[int, ...]:
        """Maximum micro-batches that each stage holds, from forward's start to backward's end.

        GPipe M, 1F1B min(M, K - k). Several stages on one device reach their maxima at different
        times (`partitioning.memory`).
        """
        most = [0] * self.num_stages
        for device in range(self.num_devices):
            held = [0] * self.num_stages
            for phase, stage, _ in self.order(device):
                held[stage] += 1 if phase == "forward" else -1
                most[stage] = max(most[stage], held[stage])
        return tuple(most)

    def order(self, device: int) -> list[Work]:
        """Return the work of a device, in order."""
        return device_order(
            self.kind, device, self.num_devices, self.num_stages, self.num_microbatches
        )

    @cached_property
    def _time_line(self) -> tuple[tuple[StageEvent, ...], tuple[StageEvent, ...]]:
        return _Run(self).finish()


def gpipe_schedule(
    forward: Sequence[float], backward: Sequence[float], num_microbatches: int
) -> list[StageEvent]:
    """Return the ideal GPipe timeline of one forward and backward, sorted by start.

    Args:
        forward: seconds of one micro-batch's forward per stage.
        backward: seconds of one micro-batch's backward per stage.
        num_microbatches: M.

    Returns:
        2·K·M events; the first starts at 0.

    Raises:
        ValueError: the lengths differ or are 0, a time is negative or not finite, or there is no
        micro-batch.
    """
    return Schedule("gpipe", tuple(forward), tuple(backward), num_microbatches).events


def one_f_one_b_schedule(
    forward: Sequence[float], backward: Sequence[float], num_microbatches: int
) -> list[StageEvent]:
    """Return the ideal 1F1B timeline; otherwise as `gpipe_schedule`.

    >>> [f"{e.phase[0]}{e.microbatch}" for e in one_f_one_b_schedule([1.0], [2.0], 2)]
    ['f0', 'b0', 'f1', 'b1']
    """
    return Schedule("1f1b", tuple(forward), tuple(backward), num_microbatches).events


def bubble_fraction(events: Iterable[StageEvent], num_stages: int) -> float:
    """Return the idle share of `num_stages` devices between the first start and the last end.

    0.0 if no event takes time. A device that only copies is idle. ValueError for another stage.
    """
    events = list(events)
    for event in events:
        if not 0 <= event.stage < num_stages:
            raise ValueError(
                f"an event is of stage {event.stage}; num_stages is {num_stages}, so give "
                f"stages 0 to {num_stages - 1}"
            )
    if not events:
        return 0.0
    makespan = max(event.end for event in events) - min(event.start for event in events)
    if makespan <= 0:
        return 0.0
    busy = math.fsum(event.end - event.start for event in events if event.phase in get_args(Phase))
    return max(0.0, 1 - busy / (num_stages * makespan))


def ideal_schedule(
    kind: ScheduleKind, events: Iterable[StageEvent], num_stages: int
) -> Schedule | None:
    """Return the ideal timeline of measured work: the same work without additional idle times.

    Its stage times are the measured means over micro-batches; recomputation, possibly a separate
    event, counts as backward.

    Args:
        kind: "gpipe", "1f1b" or "interleaved".
        events: measured forwards and backwards of one step, of each of a stage's chunks.
        num_stages: K.

    Returns:
        None if a stage lacks a forward or a backward.

    Example:
        >>> forward = StageEvent(0, 0, "forward", start=5.0, end=6.0)
        >>> backward = StageEvent(0, 0, "backward", start=8.0, end=9.5)
        >>> ideal_schedule("1f1b", [forward, backward], num_stages=1).makespan
        2.5
    """
    seconds: dict[tuple[str, int], list[float]] = {}
    seen: dict[tuple[str, int], set[int]] = {}
    for event in events:
        key = event.phase, event.stage
        seconds.setdefault(key, []).append(event.end - event.start)
        seen.setdefault(key, set()).add(event.microbatch)
    wanted = [[(phase, k) for k in range(num_stages)] for phase in get_args(Phase)]
    if not all(key in seen for row in wanted for key in row):
        return None
    forward, backward = (
        tuple(math.fsum(seconds[key]) / len(seen[key]) for key in row) for row in wanted
    )
    count = max(len(x) for x in seen.values())
    if kind != "interleaved":
        return Schedule(kind, forward, backward, count)
    several = len(seconds["forward", 0]) // len(seen["forward", 0])
    there, back = (tuple(x / several for x in part) * several for part in (forward, backward))
    return Schedule(kind, there, back, count, stages_per_device=several)


class _Run:
    """Runs the devices' orders, each piece as early as its input and its device allow."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._computed: list[StageEvent] = []
        self._copied: list[StageEvent] = []
        self._device_free = [0.0] * schedule.num_devices
        self._link_free: dict[tuple[Phase, int], float] = {}
        """End of the last copy of a phase into a stage."""
        self._arrival: dict[tuple[Phase, int, int], float] = {
            ("forward", 0, microbatch): 0.0 for microbatch in range(schedule.num_microbatches)
        }
        """When the input of (phase, stage, micro-batch) is available, or may be copied."""

    def finish(self) -> tuple[tuple[StageEvent, ...], tuple[StageEvent, ...]]:
        waiting = [deque(self._schedule.order(k)) for k in range(self._schedule.num_devices)]
        while any(waiting):
            for order in waiting:
                while order and self._work(order[0]):
                    order.popleft()
        return _by_start(self._computed), _by_start(self._copied)

    def _work(self, work: Work) -> bool:
        """Run one forward or backward, and send its output; False if its input is not ready."""
        phase, stage, microbatch = work
        device = stage % self._schedule.num_devices
        arrival = self._arrival.get((phase, stage, microbatch))
        if arrival is None:
            return False
        start = max(arrival, self._device_free[device])
        if not self._schedule.transfers_overlap:
            start = self._copy(stage, phase, microbatch, start)
        end = start + self._seconds(stage, phase, microbatch)
        self._device_free[device] = end
        self._computed.append(StageEvent(stage, microbatch, phase, start, end))
        self._send(stage, phase, microbatch, end)
        return True

    def _send(self, stage: int, phase: Phase, microbatch: int, now: float) -> None:
        target = stage + (1 if phase == "forward" else -1)
        if target == self._schedule.num_stages:
            # The last stage starts its backward: no copy.
            phase, target = "backward", stage
        elif target >= 0 and self._schedule.transfers_overlap:
            link = phase, target
            now = self._copy(target, phase, microbatch, max(now, self._link_free.get(link, 0.0)))
            self._link_free[link] = now
        self._arrival[phase, target, microbatch] = now

    def _copy(self, target: int, phase: Phase, microbatch: int, start: float) -> float:
        boundary = target - 1 if phase == "forward" else target
        if not 0 <= boundary < len(self._schedule.transfer):
            return start
        end = start + self._schedule.transfer[boundary]
        name: TransferPhase = "forward_transfer" if phase == "forward" else "backward_transfer"
        self._copied.append(StageEvent(target, microbatch, name, start, end))
        return end

    def _seconds(self, stage: int, phase: Phase, microbatch: int) -> float:
        if phase == "forward":
            return self._schedule.forward[stage]
        if microbatch == self._schedule.num_microbatches - 1:
            return self._schedule.last_backward[stage]
        return self._schedule.backward[stage]


def _by_start(events: list[StageEvent]) -> tuple[StageEvent, ...]:
    return tuple(sorted(events, key=lambda event: (event.start, event.end, event.stage)))


def _check(schedule: Schedule) -> None:
    if schedule.kind not in SCHEDULES:
        raise ValueError(f"kind is {schedule.kind!r}; give 'gpipe', '1f1b' or 'interleaved'")
    num_stages = len(schedule.forward)
    if not num_stages or num_stages != len(schedule.backward):
        raise ValueError(
            f"forward has {num_stages} and backward {len(schedule.backward)} entries; "
            "give one of each per stage"
        )
    if len(schedule.last_backward) not in (0, num_stages):
        raise ValueError(
            f"last_backward has {len(schedule.last_backward)} entries; give one per stage, "
            f"{num_stages}, or none where the last micro-batch is like the others"
        )
    if len(schedule.transfer) not in (0, num_stages - 1):
        raise ValueError(
            f"transfer has {len(schedule.transfer)} entries; give one per boundary between "
            f"stages, {num_stages - 1}, or none where copies are free"
        )
    for name in ("forward", "backward", "last_backward", "transfer"):
        for stage, seconds in enumerate(getattr(schedule, name)):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"{name}[{stage}] is {seconds}; give a finite time >= 0 s")
    if schedule.num_microbatches < 1:
        raise ValueError(f"num_microbatches is {schedule.num_microbatches}; give at least one")
    _check_interleaving(schedule)


def _check_interleaving(schedule: Schedule) -> None:
    several, num_stages = schedule.stages_per_device, len(schedule.forward)
    if schedule.kind != "interleaved":
        if several != 1:
            raise ValueError(
                f"stages_per_device is {several} with kind {schedule.kind!r}; give 1, or the kind "
                "'interleaved'"
            )
        return
    if several < 1 or num_stages % several:
        raise ValueError(
            f"stages_per_device is {several}; give a number that divides the {num_stages} stages"
        )
