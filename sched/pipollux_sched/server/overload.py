"""Cheap refusal of requests that cannot be answered in time.

A request that waits longer than its sender's timeout is computed in vain and delays all others,
until no request is answered in time. So the number of concurrent requests of each kind is limited;
further ones are refused before their token is read, with a time to retry. Heartbeats are never
refused: they cost no more than a refusal, and without them jobs would be ended.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from enum import StrEnum

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import refusal
from .limits import Limits
from .report_pace import RATE

__all__ = ["GONE", "Overload", "RequestKind", "RetrySchedule", "kind_of"]

GONE = "pipollux_gone"
"""Entry of a scope's `state`: returns whether the sender has closed its connection."""
LATEST_TURN = 60.0
"""Largest time to retry, in seconds."""
PAGE_PAUSE = 2
"""Time to retry for refused users, in seconds."""


class RequestKind(StrEnum):
    """Kinds of requests; each has its own limit."""

    VITAL = "vital"
    """Required by jobs. Cheap, or limited elsewhere; never refused here."""
    REPORT = "report"
    """Hints and progress reports, which jobs repeat."""
    PAGE = "page"
    """Requests of users."""


_JOBS_OWN = {
    "heartbeats": RequestKind.VITAL,
    "stops": RequestKind.VITAL,
    "replicas": RequestKind.VITAL,
    "inheritance": RequestKind.VITAL,
    "reports": RequestKind.REPORT,
    "hints": RequestKind.REPORT,
}
_OPEN_LONG = ("/healthz", "/events/stream")
"""Paths that must always be answered, or hold a place for hours (`Limits.listeners`)."""


def kind_of(path: str) -> RequestKind:
    """Return the kind of a request, by its path.

    Example:
        >>> kind_of("/jobs/char-lm/heartbeats"), kind_of("/overview")
        (<RequestKind.VITAL: 'vital'>, <RequestKind.PAGE: 'page'>)
    """
    if path.startswith("/jobs/"):
        return _JOBS_OWN.get(path.rpartition("/")[2], RequestKind.PAGE)
    return RequestKind.VITAL if path in _OPEN_LONG else RequestKind.PAGE


class RetrySchedule:
    """Spreads the retries of refused requests, at `rate` per second; belongs to one thread.

    Example:
        >>> turns = RetrySchedule(2.0, clock=lambda: 0.0)
        >>> [turns.next() for _ in range(5)]
        [1, 1, 2, 2, 3]
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._gap, self._clock = 1.0 / rate, clock
        self._last = 0.0

    def next(self) -> int:
        """Return the seconds until the next free turn."""
        now = self._clock()
        self._last = min(max(self._last, now) + self._gap, now + LATEST_TURN)
        return max(math.ceil(self._last - now), 1)


class Overload:
    """ASGI middleware: answers 503 to excess requests and to those whose sender has gone."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._most = {RequestKind.REPORT: limits.reporting, RequestKind.PAGE: limits.reading}
        self._under_way = dict.fromkeys(RequestKind, 0)
        self._turns = RetrySchedule(RATE)
        self._computing = asyncio.Semaphore(limits.pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        kind = kind_of(scope["path"]) if scope["type"] == "http" else RequestKind.VITAL
        if kind is RequestKind.VITAL:
            # A heartbeat counts even if its sender has closed the connection.
            await self._app(scope, receive, send)
        elif self._under_way[kind] >= self._most[kind] or _is_gone(scope):
            await self._refuse(kind)(scope, receive, send)
        else:
            self._under_way[kind] += 1
            try:
                await (self._page if kind is RequestKind.PAGE else self._app)(scope, receive, send)
            finally:
                self._under_way[kind] -= 1

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a user once few other requests are computed: all threads share one interpreter."""
        await self._computing.acquire()
        holds = True

        async def send_and_leave(message: Message) -> None:
            nonlocal holds
            if holds:  # the answer is computed: a slow reader must not hold the place
                holds = False
                self._computing.release()
            await send(message)

        try:
            page = self._refuse(RequestKind.PAGE) if _is_gone(scope) else self._app
            await page(scope, receive, send_and_leave)
        finally:
            if holds:
                self._computing.release()

    def _refuse(self, kind: RequestKind) -> ASGIApp:
        seconds = PAGE_PAUSE if kind is RequestKind.PAGE else self._turns.next()
        sentence = f"the scheduler has too much to do at the moment; ask again after {seconds} s"
        return refusal(503, sentence, {"Retry-After": str(seconds)})


def _is_gone(scope: Scope) -> bool:
    gone: Callable[[], bool] | None = scope.get("state", {}).get(GONE)
    return gone is not None and gone()
