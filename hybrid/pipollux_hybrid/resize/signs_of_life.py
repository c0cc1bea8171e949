"""Which of the others' processes are frozen: stopped, or on a machine that does not get anywhere.

The kernel answers for a frozen process, so its connections look well, and whoever waits for it
waits for the group's timeout. So each replica changes something that the others see, again and
again, and who has not changed it for long is lost. Under a scheduler heartbeats do that for the
first process of each replica, which looks at the others of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["SignsOfLife"]

LOOKS = 12
"""Looks within the time after which a replica is lost."""


@dataclass
class _Sign:
    sign: object
    silent: float = 0.0
    """Seconds for which it has stayed the same."""


class SignsOfLife:
    """What one replica has seen of the others.

    Time in which this replica did not look does not count: it may have been frozen itself, or the
    place where signs are left did not answer anybody.

    Example:
        >>> seen = SignsOfLife(60.0, clock=iter([0.0, 30.0]).__next__)
        >>> seen.look({"a": 1}), seen.look({"a": 1})
        ({}, {})

    Args:
        limit: Seconds without a new sign after which a replica is lost; 0: none ever is.
        clock: The monotonic clock.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._interval = limit / LOOKS
        self._clock = clock
        self._last = -math.inf
        self._seen: dict[str, _Sign] = {}

    def is_due(self) -> bool:
        """Return whether it is time to leave a sign, and to look."""
        return self._limit > 0 and self._clock() >= self._last + self._interval

    def look(self, signs: Mapping[str, object]) -> dict[str, float]:
        """Return the replicas that are frozen, and for how many seconds.

        Args:
            signs: What the others have left, by replica; None: nothing yet, of which nothing
                follows.
        """
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
