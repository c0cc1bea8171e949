"""Timeline of a stage in a multi-process pipeline: computing, waiting for inputs, sending.

Schedules of :mod:`torch.distributed.pipelining` request receives, wait for them, let the stage
compute, and request sends. The time from the request of receives to computing is the wait for an
input or a gradient, and that from the end of computing to the next request is sending. 1F1B starts
sends and the next receives together, and waits for both; that counts as receiving.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, NamedTuple

from .stage import NOTHING

Work = Literal[
    "forward",
    "backward",
    "receive_input",
    "receive_gradient",
    "send_output",
    "send_gradient",
]


class StageSpan(NamedTuple):
    """Work of a stage on a micro-batch; in seconds on the process's clock."""

    stage: int
    microbatch: int
    work: Work
    start: float
    end: float


class StageNotes:
    """Records of one process; unless started, nothing is recorded and the clock is not read."""

    def __init__(self) -> None:
        self._clock: Callable[[], float] = time.perf_counter
        self._spans: list[StageSpan] | None = None
        self._open: StageSpan | None = None
        self._computed = 0.0

    @property
    def running(self) -> bool:
        """Whether records are made."""
        return self._spans is not None

    def begin(self, clock: Callable[[], float]) -> None:
        """Start recording, by a clock in seconds."""
        self._clock, self._spans, self._open = clock, [], None

    def end(self) -> list[StageSpan]:
        """Stop recording; return the records."""
        spans, self._spans = self._spans or [], None
        return spans

    def computing(self, stage: int, microbatch: int, work: Work) -> AbstractContextManager[None]:
        """Record the work in this context."""
        if self._spans is None:
            return NOTHING
        return self._computing(stage, microbatch, work)

    @contextmanager
    def _computing(self, stage: int, microbatch: int, work: Work) -> Iterator[None]:
        start = self._close()
        yield
        self._computed = self._clock()
        if self._spans is not None:
            self._spans.append(StageSpan(stage, microbatch, work, start, self._computed))

    def receiving(self, stage: int, microbatch: int, work: Work) -> None:
        """Record that the stage waits for the data that it requests now."""
        if self._spans is not None:
            start = self._close()
            self._open = StageSpan(stage, microbatch, work, start, start)

    def sending(self, stage: int, microbatch: int, work: Work) -> None:
        """Record that the last result is being sent."""
        if self._spans is not None:
            self._open = StageSpan(stage, microbatch, work, self._computed, self._computed)

    def idle(self) -> None:
        """Record that the stage neither sends nor receives."""
        if self._spans is not None:
            self._close()

    def _close(self) -> float:
        now = self._clock()
        if self._open is not None and self._spans is not None:
            self._spans.append(self._open._replace(end=now))
        self._open = None
        return now
