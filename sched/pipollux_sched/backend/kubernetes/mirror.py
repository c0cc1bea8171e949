"""Copies of what the API server has, kept up to date by watches.

A `Mirror` lists the objects of a kind once, and follows their changes from there on. When the
server no longer knows the changes since then (status 410), it lists them again. While the server
does not answer, the copy stays as it is, and asking it raises `ClusterUnavailableError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx2
from lightkube import AsyncClient
from lightkube.config.kubeconfig import SingleConfig
from lightkube.core.exceptions import ConfigError

from pipollux_sched.backend.base import ClusterUnavailableError

from .api import TIMEOUT, Object, describe_error, error_code

__all__ = ["Mirror", "Mirrors", "Selection"]

_LOG = logging.getLogger(__name__)
QUIET = 60.0
"""Seconds without a change after which a watch is renewed: its connection may be dead."""
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 5.0
"""Seconds between two attempts to reach the server."""
_GONE = 410

V = TypeVar("V")
Name = tuple[str, str]
"""Namespace and name of an object."""


@dataclass(frozen=True)
class Selection:
    """Which objects are mirrored."""

    kind: type[Any]
    namespace: str | None = None
    """`*`: all; None: the kind has none."""
    labels: dict[str, Any] | None = None
    fields: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Entry(Generic[V]):
    version: int
    uid: str
    value: V


class Mirror(Generic[V]):
    """The objects of one selection, each as what `view` makes of it.

    Args:
        selection: which objects.
        view: called with each object as JSON; returns None for one to leave out.
        on_change: called after every change, by the thread of the watches.
        last: makes of the last view of a deleted object what is kept until `drop`; None: it is not
            kept.
    """

    def __init__(
        self,
        selection: Selection,
        view: Callable[[Object], V | None],
        on_change: Callable[[], None] = lambda: None,
        last: Callable[[V], V] | None = None,
    ) -> None:
        self.selection = selection
        self._view = view
        self._on_change = on_change
        self._last = last
        self._kept: dict[Name, V] = {}
        self._lock = threading.Lock()
        self._entries: dict[Name, _Entry[V]] = {}
        self._changes = 0
        self._problem = "it was not reached yet"
        self._answered = threading.Event()

    @property
    def changes(self) -> int:
        """Grows with every change."""
        return self._changes

    def values(self) -> list[V]:
        """Return all objects.

        Raises:
            ClusterUnavailableError: the server does not answer, so that they may be out of date.
        """
        self._answered.wait(TIMEOUT)
        with self._lock:
            if self._problem:
                raise ClusterUnavailableError(self._problem)
            return [*(entry.value for entry in self._entries.values()), *self._kept.values()]

    def drop(self, name: Name) -> None:
        """Forget a deleted object."""
        with self._lock:
            self._kept.pop(name, None)

    def last_values(self) -> list[V]:
        """Return the last that was known of all objects, whether the server answers or not."""
        with self._lock:
            return [entry.value for entry in self._entries.values()]

    def find(self, name: Name) -> V | None:
        """Return the last that was known of an object, whether the server answers or not."""
        with self._lock:
            entry = self._entries.get(name)
        return None if entry is None else entry.value

    def note(self, made: Object) -> None:
        """Take over an object that a call has returned, before the watch shows it."""
        self._store(made, replace=False)

    def fail(self, problem: str) -> None:
        """Record why the objects may be out of date."""
        with self._lock:
            self._problem = problem
        self._answered.set()

    def replace(self, objects: Sequence[Object], version: str) -> None:
        """Take over all objects as they were at a version; what is newer stays."""
        listed = {}
        for found in objects:
            value = self._view(found)
            if value is not None:
                listed[_name(found)] = _entry(found, value)
        with self._lock:
            newer = {
                name: entry
                for name, entry in self._entries.items()
                if entry.version > _number(version)
            }
            self._entries = listed | newer
            self._problem = ""
            self._changes += 1
        self._answered.set()
        self._on_change()

    def apply(self, change: str, changed: Object) -> None:
        """Take over one change of a watch."""
        if change == "DELETED":
            view = self._view(changed)
            with self._lock:
                entry = self._entries.get(_name(changed))
                if entry is not None and entry.uid == _uid(changed):
                    del self._entries[_name(changed)]
                    self._changes += 1
                    if self._last is not None and view is not None:
                        self._kept[_name(changed)] = self._last(view)
        elif change in ("ADDED", "MODIFIED"):
            self._store(changed, replace=True)
        self._on_change()

    def _store(self, found: Object, *, replace: bool) -> None:
        value, name = self._view(found), _name(found)
        with self._lock:
            known = self._entries.get(name)
            if value is None:
                if replace:
                    self._entries.pop(name, None)
            elif known is None or known.version < _number(_version(found)):
                self._entries[name] = _entry(found, value)
            self._changes += 1


class Mirrors:
    """Keeps mirrors up to date, in a thread of its own.

    Args:
        config: how to reach the cluster.
        mirrors: what to keep up to date.
        beside: runs beside the watches, with their client, until it is cancelled.
    """

    def __init__(
        self,
        config: SingleConfig,
        mirrors: Sequence[Mirror[Any]],
        beside: Sequence[Callable[[AsyncClient], Coroutine[Any, Any, None]]] = (),
    ) -> None:
        self._config = config
        self._mirrors = mirrors
        self._beside = beside
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="pipollux-kubernetes", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the thread of the watches; do not wait for it."""
        with contextlib.suppress(RuntimeError):  # it has ended
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
        except Exception as error:  # whatever it is, engines must not trust old objects
            _LOG.exception("the watches of the Kubernetes API have ended")
            for mirror in self._mirrors:
                mirror.fail(f"the watches of the Kubernetes API have ended: {error}")
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _follow_all(self) -> None:
        timeout = httpx2.Timeout(TIMEOUT)
        async with AsyncClient(self._config, timeout=timeout) as client:
            following = [_follow(client, mirror) for mirror in self._mirrors]
            beside = [run(client) for run in self._beside]
            tasks = [asyncio.create_task(task) for task in (*following, *beside)]
            ending = asyncio.create_task(self._ending.wait())
            done, _ = await asyncio.wait([ending, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in (ending, *tasks):
                task.cancel()
            await asyncio.gather(ending, *tasks, return_exceptions=True)
            for task in done - {ending}:
                await task  # raises what has ended it


async def _follow(client: AsyncClient, mirror: Mirror[Any]) -> None:
    """Keep a mirror up to date for ever."""
    pause = FIRST_PAUSE
    while True:
        try:
            version = await _list(client, mirror)
            pause = FIRST_PAUSE
            await _watch(client, mirror, version)
            continue  # the server no longer knows the changes: list again
        except httpx2.HTTPError as error:
            problem = describe_error(error)
        except (ConfigError, OSError, ValueError) as error:
            problem = f"the Kubernetes API cannot be asked: {error}"
        if pause == FIRST_PAUSE:
            _LOG.info("%s", problem)
        mirror.fail(problem)
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


async def _list(client: AsyncClient, mirror: Mirror[Any]) -> str:
    """List a mirror's objects; return the version from which their changes are to be followed."""
    chosen = mirror.selection
    listed = client.list(
        chosen.kind,
        **_where(chosen),
        labels=chosen.labels,
        fields=chosen.fields,
        chunk_size=500,
    )
    objects = [dict(found) async for found in listed]
    version = str(listed.resourceVersion)
    mirror.replace(objects, version)
    return version


async def _watch(client: AsyncClient, mirror: Mirror[Any], version: str) -> None:
    """Follow changes from a version on; return when the server no longer knows it."""
    while True:
        changes = _changes(client, mirror.selection, version)
        try:
            while True:
                async with asyncio.timeout(QUIET):
                    change, changed = await anext(changes)
                version = _version(changed) or version
                mirror.apply(change, dict(changed))
        except TimeoutError:
            await _ping(client, mirror.selection)
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
    """Ask for one object, to find out whether the server answers."""
    async for _ in client.list(chosen.kind, **_where(chosen), chunk_size=1):
        break


def _where(chosen: Selection) -> dict[str, Any]:
    return {} if chosen.namespace is None else {"namespace": chosen.namespace}


def _entry(found: Object, value: V) -> _Entry[V]:
    return _Entry(_number(_version(found)), _uid(found), value)


def _name(found: Object) -> Name:
    metadata = found["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _uid(found: Object) -> str:
    return str(found["metadata"].get("uid", ""))


def _version(found: Object) -> str:
    return str(found["metadata"].get("resourceVersion", ""))


def _number(version: str) -> int:
    """Return a version as a number: versions of one server can be compared."""
    return int(version) if version.isdecimal() else 0
