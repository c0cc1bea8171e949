"""Live events as server-sent events (SSE).

Each event is ``id: N`` and ``data: {…}``, the object of `GET /events`; a comment keeps an idle
connection alive. A client that reconnects with the last id misses nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing
from typing import Any, NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pipollux_sched.store import Store, StoreError
from pipollux_sched.views.events import event_summary

from .change_watch import ChangeWatch

RETRY_MS = 2000
"""Milliseconds after which a browser reconnects."""
BATCH = 500
KEPT = 2000
"""Number of newest events kept in memory for all listeners."""


class _Entry(NamedTuple):
    id: int
    job: str | None
    text: str
    summary: str | None
    """The event as a sentence, in JSON; None: not part of summaries."""


class Tail:
    """The newest events, read from the store once for all listeners."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = asyncio.Lock()
        self._version = -1
        self._entries: deque[_Entry] = deque()
        self._floor = self._last = 0
        """All events with ids in (floor, last] are kept."""

    async def read(self, after: int, job: str | None) -> tuple[list[_Entry], int, bool]:
        """Return the events after an id, the id to continue after, and whether there are more."""
        async with self._lock:
            version = self._store.version
            if version != self._version:
                await run_in_threadpool(self._refresh)
                self._version = version
            if after >= self._floor:
                return self._newer(after, job), max(after, self._last), False
            last = self._last
        # Older than the kept events: read for this listener alone, up to the first kept event.
        found = await run_in_threadpool(self._store.events, after, job=job, limit=BATCH)
        entries = [_entry(event) for event in found]
        if len(entries) == BATCH:
            return entries, entries[-1].id, True
        return entries, max([last, *(entry.id for entry in entries)]), True

    def _newer(self, after: int, job: str | None) -> list[_Entry]:
        found = []
        for entry in reversed(self._entries):
            if entry.id <= after:
                break
            if job is None or entry.job == job:
                found.append(entry)
        return found[::-1]

    def _refresh(self) -> None:
        newest = self._store.last_event()
        if newest - self._last > KEPT:
            self._entries.clear()
            self._floor = self._last = newest - KEPT
        for event in self._store.events(self._last):
            self._entries.append(_entry(event))
            self._last = event["id"]
        while len(self._entries) > KEPT:
            self._floor = self._entries.popleft().id


async def stream(
    changes: ChangeWatch,
    tail: Tail,
    after: int,
    job: str | None,
    keep_alive: float,
    *,
    summary: bool = False,
    allowed: Callable[[], bool] = lambda: True,
) -> AsyncGenerator[str]:
    """Yield the text of a stream of events, until the server stops or the listener's token ends.

    With `summary`, only events with a summary are sent, in the form of `event_summary`. Revoking a
    token is an event, and so wakes the stream to check `allowed`.
    """
    yield f"retry: {RETRY_MS}\n\n"
    async with changes.listening():
        while not changes.closed:
            version = changes.version
            try:
                entries, after, more = await tail.read(after, job)
                if not allowed():
                    return
            except StoreError:  # the store was closed, because the server stops
                return
            text = "".join((entry.summary or "") if summary else entry.text for entry in entries)
            if text:
                yield text
            if not more and not await changes.wait(version, keep_alive):
                yield ": nothing new\n\n"


class EventStream(StreamingResponse):
    """Streaming response of `stream` that holds a place among the listeners."""

    media_type = "text/event-stream"

    def __init__(self, text: AsyncGenerator[str], place: AbstractContextManager[None]) -> None:
        super().__init__(text, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._text = text
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, or raise `BusyError`."""
        async with aclosing(self._text):
            with self._place:
                await super().__call__(scope, receive, send)


def _entry(event: dict[str, Any]) -> _Entry:
    summary = event_summary(event)
    shown = None if summary is None else _message(summary.to_dict())
    return _Entry(event["id"], event["job"], _message(event), shown)


def _message(event: dict[str, Any]) -> str:
    return f"id: {event['id']}\ndata: {json.dumps(event, ensure_ascii=False, allow_nan=False)}\n\n"
