"""Batching of hints: those that arrive together are stored in one transaction.

Each request is answered only once its hints are in the store; batching saves one transaction for
each request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from pipollux_sched.store import ReceivedHints, Store

PAUSE = 0.005
"""Seconds from one writing to the next; hints that come meanwhile wait so long at the most."""


class HintsInbox:
    """Stores hints in batches on behalf of the coroutines of one event loop.

    Args:
        store: the scheduler's store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[tuple[ReceivedHints, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def put(self, job: str, generation: int, hints: Mapping[str, Any]) -> None:
        """Store the hints of a job, given as JSON; return when they are in the store.

        Raises:
            UnknownJobError: there is no such job.
            StaleGenerationError: `generation` is not the present one.
            StoreUnavailableError: the store cannot be written now.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._waiting.append((ReceivedHints(job, generation, hints), done))
        if self._task is None:
            self._task = loop.create_task(self._write(), name="pipollux-hints")
        await done

    async def _write(self) -> None:
        own = CapacityLimiter(1)  # the threads that serve requests stay free
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                await self._write_batch(batch, own)
                await asyncio.sleep(PAUSE)
        finally:
            self._task = None

    async def _write_batch(
        self, batch: list[tuple[ReceivedHints, asyncio.Future[None]]], own: CapacityLimiter
    ) -> None:
        told = [each for each, _ in batch]
        outcomes: list[Exception | None]
        try:
            outcomes = [*await run_sync(self._store.put_all_hints, told, limiter=own)]
        except Exception as error:  # the waiting requests receive any error
            outcomes = [error for _ in batch]
        for (_, done), problem in zip(batch, outcomes, strict=True):
            if done.done():  # its request was cancelled
                continue
            if problem is None:
                done.set_result(None)
            else:
                done.set_exception(problem)
