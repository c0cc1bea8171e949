"""How much is answered: requests a second, and how many may wait at once.

One sender that goes wild, a job in a loop say, must not keep the others from being heard.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pipollux_sched.errors import SchedulerError

MOST_SENDERS = 4096
"""Senders remembered at once; those that were quiet longest are forgotten first."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one scheduler answers at most. Rates are requests a second; bursts, requests at once."""

    job_rate: float = 50.0
    """Of each job's token."""
    job_burst: int = 100
    admin_rate: float = 200.0
    """Of the admin's token."""
    admin_burst: int = 400
    wrong_rate: float = 2.0
    """Requests with a wrong token, or none, from one address."""
    wrong_burst: int = 100
    waiting: int = 256
    """Requests that wait for replicas, of all jobs together."""
    waiting_per_job: int = 64
    computing: int = 4
    """Plans and reports that are made at once."""
    listeners: int = 32
    """Streams of events."""
    keep_alive: float = 15.0
    """Seconds after which a stream that has nothing to tell says so."""


class TooManyRequestsError(SchedulerError):
    """Somebody asks too often; the text says when to ask again.

    Args:
        who: who asks.
        rate: requests a second that are allowed.
        seconds: after which the next one is answered.
    """

    def __init__(self, who: str, rate: float, seconds: float) -> None:
        self.retry_after = max(1, math.ceil(seconds))
        super().__init__(
            f"{who}: more than {rate:g} requests a second are too many; "
            f"ask again after {self.retry_after} s"
        )


class BusyError(SchedulerError):
    """As many wait already as can; the text says what to do."""

    retry_after = 1


class RateLimit:
    """A bucket of tokens for each sender: a request takes one, time brings them back.

    Example:
        >>> limit = RateLimit(2.0, 1, clock=lambda: 0.0)
        >>> limit.take("char-lm"), limit.take("char-lm")
        (0.0, 0.5)

    Args:
        rate: tokens that come back each second.
        burst: tokens that a bucket holds.
        clock: tells the time in seconds; it must never go back.
    """

    def __init__(
        self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rate = rate
        self._burst = float(burst)
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, sender: str) -> float:
        """Take a token; return 0, or in how many seconds there is one."""
        with self._lock:
            now = self._clock()
            left, since = self._buckets.pop(sender, (self._burst, now))
            left = min(self._burst, left + (now - since) * self.rate)
            allowed = left >= 1.0
            # Put at the end: the first one is that of whoever was quiet longest.
            self._buckets[sender] = (left - allowed, now)
            if len(self._buckets) > MOST_SENDERS:
                del self._buckets[next(iter(self._buckets))]
            return 0.0 if allowed else (1.0 - left) / self.rate

    def check(self, sender: str, who: str) -> None:
        """Take a token, or raise `TooManyRequestsError`."""
        seconds = self.take(sender)
        if seconds > 0.0:
            raise TooManyRequestsError(who, self.rate, seconds)


class Places:
    """Room for so many at once, and so many of one sender.

    Args:
        most: of all senders together.
        most_each: of each.
        what: what they do, in words: "wait for replicas".
    """

    def __init__(self, most: int, most_each: int, what: str) -> None:
        self._most = most
        self._most_each = most_each
        self._what = what
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """How many places are taken."""
        with self._lock:
            return self._taken.total()

    @contextmanager
    def take(self, sender: str) -> Iterator[None]:
        """Hold a place, or raise `BusyError` where there is none."""
        with self._lock:
            self._check(sender)
            self._taken[sender] += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken[sender] -= 1
                if not self._taken[sender]:
                    del self._taken[sender]

    def _check(self, sender: str) -> None:
        if self._taken.total() >= self._most:
            raise BusyError(
                f"{self._most} requests already {self._what}, and no more can; "
                "ask again in a second"
            )
        if self._taken[sender] >= self._most_each:
            raise BusyError(
                f"{self._most_each} requests of {sender} already {self._what}, and no more can; "
                "ask again in a second"
            )
