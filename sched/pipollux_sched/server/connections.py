"""Limits on connections that uvicorn lacks: how many there are, and how long a head may take.

uvicorn 0.54 limits idle time between requests, the size of a request's head and how many requests
are answered at once, but neither the number of connections nor the time that a head takes: who
opens sockets and sends half a head each takes every descriptor of the process, for as long as he
likes. `BoundedProtocol` is uvicorn's own protocol with these two limits; it is handed to uvicorn by
its option `http`.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT = 10.0
"""Seconds that the head of a request may take, from the connection or its first byte on."""
MOST_CONNECTIONS = 4096
"""Connections at once, where the process may have twice as many descriptors."""
QUIET = 60.0
"""Seconds between two log lines about the same."""

_LOG = logging.getLogger(__name__)


def most_connections() -> int:
    """Return how many connections to hold: half of what the process may open, and not too many.

    The other half is for files, pipes and the store, and for connections that were accepted but
    are not counted yet.
    """
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(min(soft // 2, MOST_CONNECTIONS), 1)


class QuietLog:
    """Logs what happens again and again once a minute, with how often it happened.

    Args:
        message: what is logged, with `%d` for how often since the line before.
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self._count = 0
        self._next = 0.0

    def note(self) -> None:
        """Take note that it has happened; log it where no line was written for a minute."""
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
        """Say whether a record is written."""
        if record.levelno > logging.WARNING:
            return True
        now = time.monotonic()
        if now < self._next.get(str(record.msg), 0.0):
            return False
        self._next[str(record.msg)] = now + QUIET
        return True


class BoundedConfig(uvicorn.Config):
    """uvicorn's configuration with limits on connections.

    Args:
        app: what is served.
        most: connections at once.
        head_timeout: seconds that the head of a request may take.
        options: uvicorn's own.
    """

    def __init__(self, app: Any, *, most: int, head_timeout: float, **options: Any) -> None:
        # Who was accepted is counted two turns of the loop later, and who has to go for it closed
        # another one later; until then all of them have descriptors.
        accepted_at_a_turn = max(most // 8, 1)
        super().__init__(app, http=BoundedProtocol, backlog=accepted_at_a_turn, **options)
        self.most = most
        self.head_timeout = head_timeout
        self.crowded = QuietLog(
            f"more than {most} connections at once: %d that had sent no whole request were closed"
        )
        self.exhausted = QuietLog(
            "%d times a connection could not be accepted, as the process may open no more files; "
            "raise 'ulimit -n'"
        )


class BoundedProtocol(H11Protocol):
    """One connection. Where there are too many, the oldest without a whole request has to go.

    So a new one is always let in, and who sends his request at once, as clients do, is answered
    however many others are held open.
    """

    config: BoundedConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._since = time.monotonic()
        self._answered = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # narrower than the base class's
        """Let the connection in; another may have to go for it."""
        self._make_room()
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Take in what was sent; a head that has begun has to come to its end in time."""
        super().data_received(data)
        if self._waits:
            self._expect_head()
        else:
            self._expect_nothing()

    def on_response_complete(self) -> None:
        """Take note that it sends whole requests."""
        self._answered = True
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._expect_nothing()
        super().connection_lost(exc)

    @property
    def _waits(self) -> bool:
        """Whether it has yet to send the head of its next request."""
        return self.conn.their_state is h11.IDLE

    @property
    def _unheard(self) -> bool:
        """Whether it has yet to send a request, or the rest of one."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _expect_head(self) -> None:
        if self._deadline is None:  # what trickles in does not gain time
            self._deadline = self.loop.call_later(self.config.head_timeout, self._give_up)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        self.transport.abort()

    def _make_room(self) -> None:
        others = cast(set[BoundedProtocol], self.connections)
        if len(others) < self.config.most:
            return
        unheard = [other for other in others if other._unheard]
        if unheard:
            # Those that were never answered go before clients that keep theirs for the next time,
            # and who has only just come, and whose request was not read yet, is the last to go.
            oldest = min(unheard, key=lambda other: (other._answered, other._since))
            oldest._leave()
            self.config.crowded.note()

    def _leave(self) -> None:
        self.connections.discard(self)
        self.transport.abort()
