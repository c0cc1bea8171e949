"""Batches requests of jobs: those that arrive together are stored in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

PAUSE = 0.005
"""Seconds between two writes; the largest delay that batching adds."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Batcher(Generic[_Item, _Result]):
    """Stores items in batches on behalf of the coroutines of one event loop.

    `write` stores items, and returns for each its result, or an exception to raise.
    """

    def __init__(self, write: Callable[[list[_Item]], Sequence[_Result | Exception]]) -> None:
        self._write_all = write
        self._waiting: list[tuple[_Item, asyncio.Future[_Result]]] = []
        self._task: asyncio.Task[None] | None = None

    async def put(self, item: _Item) -> _Result:
        """Return an item's result once it is stored; raise any error of `write`."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Result] = loop.create_future()
        self._waiting.append((item, done))
        if self._task is None:
            self._task = loop.create_task(self._write(), name="pipollux-batcher")
        return await done

    async def _write(self) -> None:
        own = CapacityLimiter(1)  # leaves the threads that serve requests free
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                await self._write_batch(batch, own)
                await asyncio.sleep(PAUSE)
        finally:
            self._task = None

    async def _write_batch(
        self, batch: list[tuple[_Item, asyncio.Future[_Result]]], own: CapacityLimiter
    ) -> None:
        items = [item for item, _ in batch]
        outcomes: Sequence[_Result | Exception]
        try:
            outcomes = await run_sync(self._write_all, items, limiter=own)
        except Exception as error:  # the waiting requests receive any error
            outcomes = [error for _ in batch]
        for (_, done), outcome in zip(batch, outcomes, strict=True):
            if done.done():  # its request was cancelled
                continue
            if isinstance(outcome, Exception):
                done.set_exception(outcome)
            else:
                done.set_result(outcome)
