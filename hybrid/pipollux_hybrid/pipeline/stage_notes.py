"""What a stage in a process of its own does when: it computes, waits for its input, or sends.

Schedules of :mod:`torch.distributed.pipelining` ask a stage what to receive, wait for it, have the
stage compute, and ask what to send. So the time from asking to computing is the wait for an input
or a gradient, and that from having computed to the next question what sending took. 1F1B hands over
what it sends and asks for what comes next in one breath, and waits for both together; that counts
as receiving.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

__all__ = ["StageNotes", "StageSpan", "Work"]

Work = Literal[
    "forward",
    "backward",
    "receive_input",
    "receive_gradient",
    "send_output",
    "send_gradient",
]


class StageSpan(NamedTuple):
    """Something that a stage did with a micro-batch; seconds by the process's clock."""

    stage: int
    microbatch: int
    work: Work
    start: float
    end: float


class StageNotes:
    """Notes of one process; none are taken, nor is the clock read, unless they are asked for."""

    def __init__(self) -> None:
        self._clock: Callable[[], float] = time.perf_counter
        self._spans: list[StageSpan] | None = None
        self._open: StageSpan | None = None
        self._computed = 0.0

    @property
    def running(self) -> bool:
        """Whether notes are taken."""
        return self._spans is not None

    def begin(self, clock: Callable[[], float]) -> None:
        """Begin to take notes.

        Args:
            clock: Tells the seconds.
        """
        self._clock, self._spans, self._open = clock, [], None

    def end(self) -> list[StageSpan]:
        """Take no more notes; return those there are."""
        spans, self._spans = self._spans or [], None
        return spans

    @contextmanager
    def computing(self, stage: int, microbatch: int, work: Work) -> Iterator[None]:
        """Note what runs within."""
        if self._spans is None:
            yield
            return
        start = self._close()
        yield
        self._computed = self._clock()
        if self._spans is not None:
            self._spans.append(StageSpan(stage, microbatch, work, start, self._computed))

    def receiving(self, stage: int, microbatch: int, work: Work) -> None:
        """Note that the stage can go on with nothing but what it asks for now."""
        if self._spans is not None:
            start = self._close()
            self._open = StageSpan(stage, microbatch, work, start, start)

    def sending(self, stage: int, microbatch: int, work: Work) -> None:
        """Note that what was computed last is handed over."""
        if self._spans is not None:
            self._open = StageSpan(stage, microbatch, work, self._computed, self._computed)

    def idle(self) -> None:
        """Note that the stage neither sends nor receives any more."""
        if self._spans is not None:
            self._close()

    def _close(self) -> float:
        """End what is open; return the seconds now."""
        now = self._clock()
        if self._open is not None and self._spans is not None:
            self._spans.append(self._open._replace(end=now))
        self._open = None
        return now
