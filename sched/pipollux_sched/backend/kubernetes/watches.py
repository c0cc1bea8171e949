"""Watches of the API server, which keep mirrors up to date.

A watch lists the objects of a kind once, and follows their changes from that version on. If the
server no longer has these changes (status 410), the watch lists the objects again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import httpx2
from lightkube import AsyncClient
from lightkube.config.kubeconfig import SingleConfig
from lightkube.core.exceptions import ConfigError

from .api import TIMEOUT, describe_error, error_code
from .informer import Informer, Selection, version_of

_LOG = logging.getLogger(__name__)
QUIET = 60.0
"""Seconds without a change after which a watch is renewed: its connection may be dead."""
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 5.0
"""Longest pause in seconds between two attempts to reach the server."""
_GONE = 410


class Mirrors:
    """Keeps mirrors up to date, in a separate thread; `beside` runs there, too, until cancelled."""

    def __init__(
        self,
        config: SingleConfig,
        informers: Sequence[Informer[Any]],
        beside: Sequence[Callable[[AsyncClient], Coroutine[Any, Any, None]]] = (),
    ) -> None:
        self._config = config
        self._informers = informers
        self._beside = beside
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="pipollux-kubernetes", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the thread of the watches; do not wait for it."""
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """End all watches, and the thread."""
        if not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._follow_all())
        except Exception as error:  # whatever the error, engines must not trust old objects
            _LOG.exception("the watches of the Kubernetes API have ended")
            for informer in self._informers:
                informer.fail(f"the watches of the Kubernetes API have ended: {error}")
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _follow_all(self) -> None:
        timeout = httpx2.Timeout(TIMEOUT)
        async with AsyncClient(self._config, timeout=timeout) as client:
            following = [_follow(client, informer) for informer in self._informers]
            beside = [run(client) for run in self._beside]
            tasks = [asyncio.create_task(task) for task in (*following, *beside)]
            ending = asyncio.create_task(self._ending.wait())
            done, _ = await asyncio.wait([ending, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in (ending, *tasks):
                task.cancel()
            await asyncio.gather(ending, *tasks, return_exceptions=True)
            for task in done - {ending}:
                await task  # raises the error that ended it


async def _follow(client: AsyncClient, informer: Informer[Any]) -> None:
    pause = FIRST_PAUSE
    while True:
        try:
            version = await _list(client, informer)
            pause = FIRST_PAUSE
            await _watch(client, informer, version)
            continue  # the server no longer has the changes: list again
        except httpx2.HTTPError as error:
            problem = describe_error(error)
        except (ConfigError, OSError, ValueError) as error:
            problem = f"the Kubernetes API cannot be asked: {error}"
        if pause == FIRST_PAUSE:
            _LOG.info("%s", problem)
        informer.fail(problem)
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


async def _list(client: AsyncClient, informer: Informer[Any]) -> str:
    chosen = informer.selection
    listed = client.list(
        chosen.kind, **_where(chosen), labels=chosen.labels, fields=chosen.fields, chunk_size=500
    )
    # Convert each at once: thousands of pods as JSON take hundreds of megabytes.
    kept = dict(filter(None, [informer.read(dict(found)) async for found in listed]))
    version = str(listed.resourceVersion)
    informer.replace(kept, version)
    return version


async def _watch(client: AsyncClient, informer: Informer[Any], version: str) -> None:
    """Follow changes from a version on; return when the server no longer has them."""
    while True:
        changes = _changes(client, informer.selection, version)
        try:
            while True:
                async with asyncio.timeout(QUIET):
                    change, changed = await anext(changes)
                version = version_of(changed) or version
                informer.apply(change, dict(changed))
        except TimeoutError:
            await _ping(client, informer.selection)
        except StopAsyncIteration:
            pass
        except httpx2.HTTPError as error:
            if error_code(error) == _GONE:
                return
            raise
        finally:
            await changes.aclose()  # type: ignore[attr-defined]  # lightkube yields them


def _changes(
    client: AsyncClient, chosen: Selection, version: str
) -> AsyncIterator[tuple[str, Any]]:
    return aiter(
        client.watch(
            chosen.kind,
            **_where(chosen),
            labels=chosen.labels,
            fields=chosen.fields,
            resource_version=version,
        )
    )


async def _ping(client: AsyncClient, chosen: Selection) -> None:
    """Request one object to check that the server answers."""
    async for _ in client.list(chosen.kind, **_where(chosen), chunk_size=1):
        break


def _where(chosen: Selection) -> dict[str, Any]:
    return {} if chosen.namespace is None else {"namespace": chosen.namespace}
