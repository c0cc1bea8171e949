"""Times how long training waits for other replicas after its last gradient.

On CPUs the host waits, and the clock is read. On CUDA devices streams wait: events time them, and
are read at a later step, once they are over, so that timing never blocks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

Span = tuple[torch.cuda.Event, torch.cuda.Event]


class CommTimer:
    """Times the end of each synchronizing backward."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._cuda = sorted({d for d in devices if d.type == "cuda"}, key=str)
        self._started = 0.0
        self._events: list[torch.cuda.Event] = []
        self._open: deque[list[Span]] = deque()
        self._latest = 0.0

    def start(self) -> None:
        """Start timing: the last gradient is final."""
        self._started = time.perf_counter()
        self._events = [self._record(device) for device in self._cuda]

    def stop(self) -> float:
        """Return seconds since :meth:`start`; with CUDA those of a step that is over."""
        if not self._cuda:
            return time.perf_counter() - self._started
        ends = [self._record(device) for device in self._cuda]
        self._open.append(list(zip(self._events, ends, strict=True)))
        while self._open and all(end.query() for _, end in self._open[0]):
            spans = self._open.popleft()
            self._latest = max(begin.elapsed_time(end) for begin, end in spans) / 1000.0
        return self._latest

    @staticmethod
    def _record(device: torch.device) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event
