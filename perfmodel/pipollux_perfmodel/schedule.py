"""GPipe's time line: which stage works on which micro-batch when (Huang et al., NeurIPS'19).

Micro-batch i enters stage k as soon as it has left stage k - 1 and stage k is done with micro-batch
i - 1. When the last stage has finished its last forward, backwards run through the stages in
reverse, last micro-batch first. For K = 3 stages, M = 4 micro-batches, equal times:

    stage 0   F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0
    stage 1   .. F0 F1 F2 F3 .. .. B3 B2 B1 B0 ..
    stage 2   .. .. F0 F1 F2 F3 B3 B2 B1 B0 .. ..

The dots are the bubble. With stage times f_k and g_k the whole takes
Σf + (M - 1)·max f + Σg + (M - 1)·max g, the `T_pipe` of `steptime` at ω = 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

Phase = Literal["forward", "backward"]


class StageEvent(NamedTuple):
    """One forward or backward of one micro-batch in one stage; times in seconds."""

    stage: int
    microbatch: int
    phase: Phase
    start: float
    end: float


def gpipe_schedule(
    forward: Sequence[float], backward: Sequence[float], num_microbatches: int
) -> list[StageEvent]:
    """Return the ideal GPipe time line of one forward and backward, sorted by start.

    Args:
        forward: seconds of one micro-batch's forward per stage.
        backward: seconds of one micro-batch's backward per stage.
        num_microbatches: M.

    Returns:
        2·K·M events; the first starts at 0.

    Raises:
        ValueError: when the two have different lengths or none, a time is negative or not finite,
            or there is no micro-batch.
    """
    _check(forward, backward, num_microbatches)
    stages = range(len(forward))
    microbatches = range(num_microbatches)
    forwards = _flow(forward, stages, microbatches, "forward", 0.0)
    turn = max(event.end for event in forwards)
    backwards = _flow(backward, stages[::-1], microbatches[::-1], "backward", turn)
    return sorted(forwards + backwards, key=lambda event: (event.start, event.end, event.stage))


def bubble_fraction(events: Iterable[StageEvent], num_stages: int) -> float:
    """Return the idle share of `num_stages` devices between the first start and the last end.

    0.0 when there is no event, or none that takes time.

    Raises:
        ValueError: when an event names a stage outside of `num_stages`.
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
    busy = math.fsum(event.end - event.start for event in events)
    return max(0.0, 1 - busy / (num_stages * makespan))


def _flow(
    times: Sequence[float],
    stages: Sequence[int],
    microbatches: Sequence[int],
    phase: Phase,
    begin: float,
) -> list[StageEvent]:
    """Run the micro-batches through the stages, both in the order given."""
    events = []
    free = dict.fromkeys(stages, begin)
    for microbatch in microbatches:
        arrival = begin
        for stage in stages:
            start = max(arrival, free[stage])
            arrival = free[stage] = start + times[stage]
            events.append(StageEvent(stage, microbatch, phase, start, arrival))
    return events


def _check(forward: Sequence[float], backward: Sequence[float], num_microbatches: int) -> None:
    if not forward or len(forward) != len(backward):
        raise ValueError(
            f"forward has {len(forward)} and backward {len(backward)} entries; "
            "give one of each per stage"
        )
    for name, times in (("forward", forward), ("backward", backward)):
        for stage, seconds in enumerate(times):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"{name}[{stage}] is {seconds}; give a finite time >= 0 s")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches is {num_microbatches}; give at least one")
