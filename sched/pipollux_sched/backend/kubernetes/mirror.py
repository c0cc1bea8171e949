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
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import httpx2
from lightkube import AsyncClient
from lightkube.config.kubeconfig import SingleConfig
from lightkube.core.exceptions import ConfigError

from pipollux_sched.backend.base import ClusterUnavailableError

from .api import TIMEOUT, Object, describe_error, error_code

__all__ = ["Derived", "Mirror", "Mirrors", "Selection"]

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


class _Entry(NamedTuple, Generic[V]):
    version: int
    uid: str
    value: V


Listed: TypeAlias = tuple[Name, _Entry[V]]
"""A listed object, as `Mirror.read` returns it."""


class Mirror(Generic[V]):
    """The objects of one selection, each as what `view` makes of it.

    Args:
        selection: which objects.
        view: called with each object as JSON; returns None for one to leave out.
        on_change: called after every change with the views that are new or differ, and with those
            that are gone; by the thread of the watches.
        last: makes of the last view of a deleted object what is kept until `drop`; None: it is not
            kept.
        group: returns what `group` finds a view by.
    """

    def __init__(
        self,
        selection: Selection,
        view: Callable[[Object], V | None],
        on_change: Callable[[Sequence[V], Sequence[V]], None] = lambda *_: None,
        last: Callable[[V], V] | None = None,
        group: Callable[[V], str] = lambda _: "",
    ) -> None:
        self.selection = selection
        self._view = view
        self._on_change = on_change
        self._last = last
        self._group = group
        self._kept: dict[Name, V] = {}
        self._lock = threading.Lock()
        self._entries: dict[Name, _Entry[V]] = {}
        self._groups: dict[str, dict[Name, None]] = {}
        self._changes = 0
        self._problem = "it was not reached yet"
        self._answered = threading.Event()

    @property
    def changes(self) -> int:
        """Grows with every change of what `values` returns."""
        return self._changes

    def check(self) -> None:
        """Do nothing, if the server answers.

        Raises:
            ClusterUnavailableError: it does not, so that the objects may be out of date.
        """
        self._answered.wait(TIMEOUT)
        if problem := self._problem:
            raise ClusterUnavailableError(problem)

    def values(self) -> list[V]:
        """Return all objects.

        Raises:
            ClusterUnavailableError: see `check`.
        """
        self.check()
        with self._lock:
            return [*(entry.value for entry in self._entries.values()), *self._kept.values()]

    def group(self, group: str) -> list[V]:
        """Return those of all objects that belong together.

        Raises:
            ClusterUnavailableError: see `check`.
        """
        self.check()
        with self._lock:
            there = [self._entries[name].value for name in self._groups.get(group, ())]
            return there + [value for value in self._kept.values() if self._group(value) == group]

    def drop(self, name: Name) -> None:
        """Forget a deleted object."""
        with self._lock:
            if self._kept.pop(name, None) is not None:
                self._changes += 1

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

    def read(self, found: Object) -> Listed[V] | None:
        """Return what is kept of a listed object; None if it is left out."""
        value = self._view(found)
        return None if value is None else (_name(found), _entry(found, value))

    def replace(self, listed: dict[Name, _Entry[V]], version: str) -> None:
        """Take over all objects as they were at a version, see `read`; what is newer stays."""
        with self._lock:
            before = self._entries
            newer = {
                name: entry for name, entry in before.items() if entry.version > _number(version)
            }
            self._entries = {
                # What was made of the same view stays valid.
                name: entry._replace(value=before[name].value)
                if name in before and before[name].value == entry.value
                else entry
                for name, entry in (listed | newer).items()
            }
            self._groups = {}
            for name, entry in self._entries.items():
                self._groups.setdefault(self._group(entry.value), {})[name] = None
            changed = [
                entry.value
                for name, entry in self._entries.items()
                if name not in before or before[name].value is not entry.value
            ]
            gone = [before[name].value for name in before.keys() - self._entries.keys()]
            self._problem = ""
            if changed or gone:
                self._changes += 1
        self._answered.set()
        self._on_change(changed, gone)

    def apply(self, change: str, changed: Object) -> None:
        """Take over one change of a watch."""
        if change == "DELETED":
            view, name = self._view(changed), _name(changed)
            with self._lock:
                entry = self._entries.get(name)
                if entry is None or entry.uid != _uid(changed):
                    return
                self._remove(name)
                self._changes += 1
                if self._last is not None and view is not None:
                    self._kept[name] = self._last(view)
            self._on_change([], [entry.value])
        elif change in ("ADDED", "MODIFIED"):
            new, gone = self._store(changed, replace=True)
            if new or gone:
                self._on_change(new, gone)

    def _store(self, found: Object, *, replace: bool) -> tuple[list[V], list[V]]:
        """Take over an object; return the view that is new, and the one that is gone."""
        value, name = self._view(found), _name(found)
        with self._lock:
            known = self._entries.get(name)
            if value is None:
                if known is None or not replace:
                    return [], []
                self._remove(name)
                self._changes += 1
                return [], [known.value]
            made = _entry(found, value)
            if known is not None and known.version >= made.version:
                return [], []
            if known is not None and known.value == value:
                self._entries[name] = made._replace(value=known.value)
                return [], []
            if known is not None and self._group(known.value) != self._group(value):
                self._remove(name)
            self._entries[name] = made
            self._groups.setdefault(self._group(value), {})[name] = None
            self._changes += 1
        return [value], []

    def _remove(self, name: Name) -> None:
        """Take an entry out, with the lock held."""
        group = self._group(self._entries.pop(name).value)
        self._groups[group].pop(name)
        if not self._groups[group]:
            del self._groups[group]


class Derived(Generic[V]):
    """What is made of some mirrors, and made again only when one of them has changed.

    Args:
        mirrors: those that it is made of.
        make: makes it.
    """

    def __init__(self, mirrors: Sequence[Mirror[Any]], make: Callable[[], V]) -> None:
        self._mirrors = mirrors
        self._make = make
        self._made: tuple[list[int], V] | None = None

    def get(self) -> V:
        """Return it.

        Raises:
            ClusterUnavailableError: see `Mirror.check`.
        """
        for mirror in self._mirrors:
            mirror.check()
        # Before: what changes while it is made is not in it for sure.
        changes = [mirror.changes for mirror in self._mirrors]
        if self._made is None or self._made[0] != changes:
            self._made = changes, self._make()
        return self._made[1]

    def forget(self) -> None:
        """Make it again the next time."""
        self._made = None


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
    # Each at once, as thousands of pods as JSON take hundreds of megabytes.
    kept = dict(filter(None, [mirror.read(dict(found)) async for found in listed]))
    version = str(listed.resourceVersion)
    mirror.replace(kept, version)
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
