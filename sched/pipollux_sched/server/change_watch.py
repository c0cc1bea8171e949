"""Wait for commits without a thread or a database connection per waiter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from pipollux_sched.store import Store

LOOK = 1.0
"""Seconds between two checks of the waiting thread for remaining listeners."""
PAUSE = 0.1
"""Seconds between two wake-ups; commits in between are announced together."""


class ChangeWatch:
    """Wakes coroutines of one event loop when the store has changed; one thread waits for all."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._num_listening = 0
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self.closed = False

    @property
    def version(self) -> int:
        """The version to pass to `wait`; read it before the data."""
        return self._store.version

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Register as a listener within the context."""
        self._loop = asyncio.get_running_loop()
        self._num_listening += 1
        if self._task is None:
            self._task = self._loop.create_task(self._watch(), name="pipollux-change-watch")
        try:
            yield
        finally:
            self._num_listening -= 1

    async def wait(self, version: int, timeout: float) -> bool:
        """Return whether there was a commit after `version`; wait for `timeout` seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._store.version == version and not self.closed:
                    await self._changed.wait()
        return self._store.version != version or self.closed

    def close(self) -> None:
        """Release all waiters; may be called from any thread."""
        self.closed = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended, and so have its waiters
                self._loop.call_soon_threadsafe(self._wake)

    async def _watch(self) -> None:
        own = CapacityLimiter(1)  # leaves the threads that serve requests free
        version = self._store.version
        try:
            while self._num_listening and not self.closed:
                now = await run_sync(self._store.wait, version, LOOK, limiter=own)
                if now != version:
                    version = now
                    self._wake()
                    await asyncio.sleep(PAUSE)
        finally:
            self._task = None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
