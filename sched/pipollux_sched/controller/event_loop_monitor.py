"""A clock that stops while the scheduler answers no requests, and so gets no heartbeats."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["MOST_AHEAD", "TICK", "EventLoopMonitor"]

TICK = 1.0
"""Seconds between two ticks of a responsive scheduler."""
MOST_AHEAD = 2.0
"""Seconds that the clock runs after a tick."""


class EventLoopMonitor:
    """Monotonic seconds during which the scheduler answered requests; safe for any thread.

    Example:
        >>> now = 0.0
        >>> clock = EventLoopMonitor(clock=lambda: now)
        >>> now = 1.5
        >>> clock()
        1.5
        >>> now = 100.0
        >>> clock.tick(), clock()
        (None, 2.0)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._heard, self._ticked = 0.0, clock()

    def __call__(self) -> float:
        """Return the time."""
        with self._lock:
            return self._heard + min(self._clock() - self._ticked, MOST_AHEAD)

    def tick(self) -> None:
        """Record that requests are being answered."""
        with self._lock:
            now = self._clock()
            self._heard += min(now - self._ticked, MOST_AHEAD)
            self._ticked = now
