"""How often jobs report progress, so that all of them together are not too much for one store.

Few jobs report once a second. Of many, each is told to wait longer, and sends fewer points (as the
reporter of `pipollux_hybrid` does), so that the load does not grow with the number of jobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["LEAST", "MOST", "RATE", "ReportPace"]

RATE = 100.0
"""Reports a second of all jobs together, at most, where that leaves each one in `MOST` seconds."""
LEAST, MOST = 1.0, 60.0
"""Seconds between two reports of a job."""


class ReportPace:
    """Counts the jobs that report, and says when each is to report again.

    Belongs to one thread.

    Example:
        >>> pace = ReportPace(clock=lambda: 0.0)
        >>> [pace.note(f"job-{number}") for number in range(200)][-1]
        2.0

    Args:
        clock: returns the time in seconds; must be monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._now: set[str] = set()
        self._before: set[str] = set()
        """Jobs that reported in the time of `MOST` seconds before this one."""

    def note(self, job: str) -> float:
        """Note a report of a job; return the seconds until its next one."""
        passed = self._clock() - self._since
        if passed >= MOST:
            self._before = self._now if passed < 2 * MOST else set()
            self._now, self._since = set(), self._clock()
        self._now.add(job)
        number = max(len(self._now), len(self._before))
        return min(max(number / RATE, LEAST), MOST)
