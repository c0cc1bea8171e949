"""Detects frozen processes: stopped, or on a machine that makes no progress.

The kernel answers for a frozen process, and its peers would wait for the group's timeout. So each
replica regularly changes a sign that the others see, and one whose sign does not change for long is
lost. Under a scheduler heartbeats are the signs of a replica's first process, which watches its
other processes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["SignsOfLife"]

LOOKS = 12
"""Number of checks within the timeout."""


@dataclass
class _Sign:
    sign: object
    silent: float = 0.0


class SignsOfLife:
    """One replica's observations of the others.

    Periods in which this replica did not check do not count: it may have been frozen itself, or the
    storage of signs may have been unavailable.

    Example:
        >>> seen = SignsOfLife(60.0, clock=iter([0.0, 30.0]).__next__)
        >>> seen.look({"a": 1}), seen.look({"a": 1})
        ({}, {})

    Args:
        limit: Seconds without a new sign after which a replica is lost; 0: never.
        clock: The monotonic clock.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._interval = limit / LOOKS
        self._clock = clock
        self._last = -math.inf
        self._seen: dict[str, _Sign] = {}

    def is_due(self) -> bool:
        """Return whether it is time to leave a sign and to check the others."""
        return self._limit > 0 and self._clock() >= self._last + self._interval

    def look(self, signs: Mapping[str, object]) -> dict[str, float]:
        """Return the frozen replicas, with seconds since their last signs; None: no sign yet."""
        now = self._clock()
        passed, self._last = min(now - self._last, 2 * self._interval), now
        for replica, sign in signs.items():
            seen = self._seen.get(replica)
            if seen is None or sign is None or seen.sign != sign:
                self._seen[replica] = _Sign(sign)
            else:
                seen.silent += passed
        self._seen = {x: seen for x, seen in self._seen.items() if x in signs}
        return {x: seen.silent for x, seen in self._seen.items() if seen.silent > self._limit}
