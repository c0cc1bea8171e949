"""Rate limits, so that one misbehaving sender, such as a job in a loop, cannot block the others."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pipollux_sched.errors import SchedulerError

MOST_SENDERS = 16_384
"""Senders to remember; the longest idle ones are forgotten first."""
REPLICAS_OF_A_RATE = 32
"""Replicas covered by a job's rate and burst; more replicas scale both in proportion."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one scheduler. Rates are requests per second; bursts, concurrent requests."""

    job_rate: float = 50.0
    """Requests a second with a job's token, for each 32 replicas of the job."""
    job_burst: int = 100
    """The same at once."""
    admin_rate: float = 200.0
    """Requests a second with the admin's token, and with each user's."""
    admin_burst: int = 400
    """The same at once."""
    wrong_rate: float = 2.0
    """Requests a second from one address with a wrong token or none."""
    wrong_burst: int = 100
    """The same at once."""
    waiting: int = 256
    """Requests that wait for replica addresses, of all jobs."""
    waiting_per_job: int = 64
    """The same of one job."""
    computing: int = 3
    """Plans, forecasts of new jobs, and reports computed at the same time."""
    computing_per_user: int = 2
    """The same for one user."""
    listeners: int = 32
    """Event streams."""
    listeners_per_user: int = 8
    """The same of one user."""
    reporting: int = 128
    """Reports and hints processed at the same time; further ones get 503."""
    reading: int = 32
    """Users' requests processed at the same time; further ones get 503."""
    pages: int = 4
    """Users' requests computed at the same time; others wait."""
    keep_alive: float = 15.0
    """Seconds of silence after which an event stream sends a comment."""


class TooManyRequestsError(SchedulerError):
    """A sender exceeds its rate; the text has the time to retry."""

    def __init__(self, who: str, rate: float, seconds: float) -> None:
        self.retry_after = max(1, math.ceil(seconds))
        super().__init__(
            f"{who}: more than {rate:g} requests per second are too many; "
            f"ask again after {self.retry_after} s"
        )


class BusyError(SchedulerError):
    """All places are taken; the text gives the remedy."""

    retry_after = 1


class RateLimit:
    """Token bucket per sender: a request takes a token, time restores `rate` tokens a second.

    Example:
        >>> limit = RateLimit(2.0, 1, clock=lambda: 0.0)
        >>> limit.take("char-lm"), limit.take("char-lm")
        (0.0, 0.5)
    """

    def __init__(
        self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rate = rate
        self._burst = float(burst)
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, sender: str, cost: float = 1.0) -> float:
        """Take a token, or a fraction, and return 0; or return the seconds until there is one."""
        with self._lock:
            now = self._clock()
            left, since = self._buckets.pop(sender, (self._burst, now))
            left = min(self._burst, left + (now - since) * self.rate)
            allowed = left >= cost
            # Moved to the end: the first bucket belongs to the longest idle sender.
            self._buckets[sender] = (left - cost * allowed, now)
            if len(self._buckets) > MOST_SENDERS:
                del self._buckets[next(iter(self._buckets))]
            return 0.0 if allowed else (cost - left) / self.rate

    def check(self, sender: str, who: str, times: float = 1.0) -> None:
        """Take a token, or raise `TooManyRequestsError`; `times` scales rate and burst."""
        seconds = self.take(sender, 1.0 / times)
        if seconds > 0.0:
            raise TooManyRequestsError(who, times * self.rate, seconds)


class ConcurrencyLimit:
    """Limit on concurrent requests, in total and per sender, with places reserved for admins."""

    def __init__(self, most: int, most_each: int, what: str, *, reserved: int = 0) -> None:
        self._most = most
        self._reserved = reserved
        self._most_each = most_each
        self._what = what
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """Number of places taken."""
        with self._lock:
            return self._taken.total()

    @contextmanager
    def take(self, sender: str, *, all_of_them: bool = False) -> Iterator[None]:
        """Hold a place (for admins: a reserved one, too), or raise `BusyError` if none is free."""
        with self._lock:
            if all_of_them:
                self._check(sender, self._most, self._most)
            else:
                self._check(sender, self._most_each, self._most - self._reserved)
            self._taken[sender] += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken[sender] -= 1
                if not self._taken[sender]:
                    del self._taken[sender]

    def _check(self, sender: str, most: int, together: int) -> None:
        if self._taken.total() >= together:
            raise BusyError(
                f"{together} requests already {self._what}, which is the limit; "
                "try again in a second"
            )
        if self._taken[sender] >= most:
            raise BusyError(
                f"{most} requests of {sender} already {self._what}, which is the limit; "
                "try again in a second"
            )
