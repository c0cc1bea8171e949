"""The interval of progress reports, which grows with the jobs, and bounds the store's load."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["LEAST", "MOST", "RATE", "ReportPace"]

RATE = 100.0
"""Target rate of reports per second of all jobs, subject to the interval `MOST` per job."""
LEAST, MOST = 1.0, 60.0


class ReportPace:
    """Counts the reporting jobs, and returns the interval of their reports; belongs to one thread.

    Example:
        >>> pace = ReportPace(clock=lambda: 0.0)
        >>> [pace.note(f"job-{number}") for number in range(200)][-1]
        2.0
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._now: set[str] = set()
        self._before: set[str] = set()
        """Jobs that reported in the previous `MOST` seconds."""

    def note(self, job: str) -> float:
        """Record a report of a job; return the seconds until its next report."""
        passed = self._clock() - self._since
        if passed >= MOST:
            self._before = self._now if passed < 2 * MOST else set()
            self._now, self._since = set(), self._clock()
        self._now.add(job)
        number = max(len(self._now), len(self._before))
        return min(max(number / RATE, LEAST), MOST)
