"""Limits on connections that uvicorn lacks: their number, and the time for a request's head.

uvicorn 0.54 limits neither the number of connections, nor the time that a request's head takes,
nor, with httptools, its size: a client that opens sockets and sends half a head on each can hold
every descriptor of the process forever. `BoundedProtocol` is uvicorn's protocol with these limits.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import select
import time
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .overload import GONE

HEAD_TIMEOUT = 10.0
"""Seconds allowed for the head of a request, from the connection or its first byte on."""
MOST_HEAD = 2**16
"""Largest head of a request, in bytes."""
MOST_CONNECTIONS = 16384
"""Largest number of connections, if the process may have twice as many descriptors."""
_CLOSED = getattr(select, "POLLRDHUP", 0)
"""Event of `poll` besides errors: on Linux, that the peer has closed its writing side."""
QUIET = 60.0

_LOG = logging.getLogger(__name__)


def most_connections() -> int:
    """Return half the process's descriptors, up to a maximum: files and the store need some."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(min(soft // 2, MOST_CONNECTIONS), 1)


class QuietLog:
    """Logs a repeated event once a minute; `%d` in the message is the count since the last line."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._count = 0
        self._next = 0.0

    def note(self) -> None:
        """Count the event; log it if no line was written for a minute."""
        self._count += 1
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + QUIET
            _LOG.warning(self._message, self._count)
            self._count = 0


class Repeats(logging.Filter):
    """Lets each warning of a logger through once a minute; errors always."""

    def __init__(self) -> None:
        super().__init__()
        self._next: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written."""
        if record.levelno > logging.WARNING:
            return True
        now = time.monotonic()
        if now < self._next.get(str(record.msg), 0.0):
            return False
        self._next[str(record.msg)] = now + QUIET
        return True


class BoundedConfig(uvicorn.Config):
    """uvicorn's configuration, with the largest number of connections and the timeout of a head."""

    def __init__(self, app: Any, *, most: int, head_timeout: float, **options: Any) -> None:
        # A new connection is counted two turns of the loop later, and the one evicted for it is
        # closed one turn after that; until then all of them hold descriptors.
        accepted_at_a_turn = max(most // 8, 1)
        super().__init__(app, http=BoundedProtocol, backlog=accepted_at_a_turn, **options)
        self.most = most
        self.head_timeout = head_timeout
        self.never_answered: dict[BoundedProtocol, None] = {}
        """Connections without a complete request, oldest first."""
        self.idle: dict[BoundedProtocol, None] = {}
        """Keep-alive connections between requests, in the order of their last request."""
        self.crowded = QuietLog(
            f"more than {most} connections at once: %d that had sent no whole request were closed"
        )
        self.exhausted = QuietLog(
            "%d times a connection could not be accepted, as the process may open no more files; "
            "raise 'ulimit -n'"
        )


class BoundedProtocol(HttpToolsProtocol):
    """One connection. At the limit, the oldest connection without a complete request is evicted.

    So a client that sends its request at once is answered, however many other connections are open.
    """

    config: BoundedConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app_state = {**self.app_state, GONE: self._is_gone}
        self._deadline: asyncio.TimerHandle | None = None
        self._head_size = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # narrower than the base class's
        """Accept the connection; another may be evicted for it."""
        self._make_room()
        super().connection_made(transport)
        self.config.never_answered[self] = None
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Receive data; a started head must be complete in time."""
        super().data_received(data)
        if not self._unheard:
            self._count_as_heard()
        if not self._waits:
            self._head_size = 0
            self._expect_nothing()
            return
        self._head_size += len(data)
        if self._head_size > MOST_HEAD:
            self._give_up()
        else:
            self._expect_head()

    def on_response_complete(self) -> None:
        """Record that the client sends complete requests."""
        super().on_response_complete()
        self._count_as_heard()
        if self._unheard and not self.transport.is_closing():
            self.config.idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the counts."""
        self._expect_nothing()
        self._count_as_heard()
        super().connection_lost(exc)
        # Break reference cycles, so that memory is freed at once: Python collects cycles so seldom
        # that thousands of connections a minute would fill the memory.
        self.app_state = {}
        self.scope = self.cycle = None  # type: ignore[assignment]  # as before the first request
        self.pipeline.clear()
        self._unset_keepalive_if_required()

    @property
    def _waits(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _unheard(self) -> bool:
        return self._waits or self.cycle.more_body

    def _is_gone(self) -> bool:
        """Return whether the client has closed the connection, even if that is unread."""
        number = self.transport.get_extra_info("socket").fileno()
        if number < 0 or self.transport.is_closing():
            return True
        ends = select.poll()
        ends.register(number, _CLOSED)
        return bool(ends.poll(0))

    def _expect_head(self) -> None:
        if self._deadline is None:  # later data must not extend the time
            self._deadline = self.loop.call_later(self.config.head_timeout, self._give_up)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._expect_nothing()
        self.transport.abort()

    def _make_room(self) -> None:
        if len(self.connections) < self.config.most:
            return
        # Connections that were never answered are evicted before idle keep-alive connections, and a
        # new one whose request was not read yet comes last.
        oldest = next(iter(self.config.never_answered or self.config.idle), None)
        if oldest is not None:
            oldest._leave()
            self.config.crowded.note()

    def _count_as_heard(self) -> None:
        self.config.never_answered.pop(self, None)
        self.config.idle.pop(self, None)

    def _leave(self) -> None:
        self._count_as_heard()
        self.connections.discard(self)
        self.transport.abort()
