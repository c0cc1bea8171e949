"""Local mirrors of API objects, which watches keep up to date (`watches`).

While the server does not answer, a mirror is unchanged; reads raise `ClusterUnavailableError`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from pipollux_sched.backend.base import ClusterUnavailableError

from .api import TIMEOUT, Object

V = TypeVar("V")
Name = tuple[str, str]


@dataclass(frozen=True)
class Selection:
    """The objects that are mirrored."""

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


class Informer(Generic[V]):
    """The objects of one selection, converted by `view`.

    Args:
        view: converts each object from JSON; returns None to leave it out.
        on_change: called after every change with the new or changed views, and with the removed
            ones, in the thread of the watches.
        last: converts the last view of a deleted object, which is kept until `drop`; None: not
            kept.
        group: returns the key by which `group` finds a view.
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
        self._seen = 0
        """The version of the last list or change."""
        self._problem = "it was not reached yet"
        self._answered = threading.Event()

    @property
    def changes(self) -> int:
        """Grows with every change of the result of `values`."""
        return self._changes

    def check(self) -> None:
        """Raise `ClusterUnavailableError` if the objects may be out of date."""
        self._answered.wait(TIMEOUT)
        if problem := self._problem:
            raise ClusterUnavailableError(problem)

    def values(self) -> list[V]:
        """Return all objects, after `check`."""
        self.check()
        with self._lock:
            return [*(entry.value for entry in self._entries.values()), *self._kept.values()]

    def group(self, group: str) -> list[V]:
        """Return the objects of a group, after `check`."""
        self.check()
        with self._lock:
            there = [self._entries[name].value for name in self._groups.get(group, ())]
            return there + [value for value in self._kept.values() if self._group(value) == group]

    def drop(self, name: Name) -> None:
        """Remove a deleted object."""
        with self._lock:
            if self._kept.pop(name, None) is not None:
                self._changes += 1

    def find(self, name: Name) -> V | None:
        """Return the last known state of an object, whether the server answers or not."""
        with self._lock:
            entry = self._entries.get(name)
        return None if entry is None else entry.value

    def note(self, made: Object) -> None:
        """Store an object that a call has returned, unless the watch has shown it, or its end."""
        self._store(made, replace=False)

    def fail(self, problem: str) -> None:
        """Record why the objects may be out of date."""
        with self._lock:
            self._problem = problem
        self._answered.set()

    def read(self, found: Object) -> Listed[V] | None:
        """Return the entry for a listed object; None if it is left out."""
        value = self._view(found)
        return None if value is None else (_name(found), _entry(found, value))

    def replace(self, listed: dict[Name, _Entry[V]], version: str) -> None:
        """Replace all objects by those at a version, see `read`; newer ones stay."""
        with self._lock:
            self._seen = max(self._seen, _number(version))
            before = self._entries
            newer = {
                name: entry for name, entry in before.items() if entry.version > _number(version)
            }
            self._entries = {
                # Keep values derived from an unchanged view.
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
        """Apply one change of a watch."""
        if change == "DELETED":
            view, name = self._view(changed), _name(changed)
            with self._lock:
                self._seen = max(self._seen, _number(version_of(changed)))
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
            # Changes arrive in their order: one that is not there any more was deleted since.
            is_over = known is None and not replace and 0 < made.version <= self._seen
            if is_over or (known is not None and known.version >= made.version):
                return [], []
            self._seen = max(self._seen, made.version if replace else 0)
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
        group = self._group(self._entries.pop(name).value)
        self._groups[group].pop(name)
        if not self._groups[group]:
            del self._groups[group]


class Source(Protocol):
    """A source of `Derived`, such as an `Informer`."""

    @property
    def changes(self) -> int:
        """Grows with every change."""

    def check(self) -> None:
        """Raise if it may be out of date."""


class Derived(Generic[V]):
    """A value derived from mirrors or other sources, recomputed only when one has changed."""

    def __init__(self, sources: Sequence[Source], make: Callable[[], V]) -> None:
        self._sources = sources
        self._make = make
        self._made: tuple[list[int], V] | None = None

    def get(self) -> V:
        """Return the value, after the sources' `check`."""
        for source in self._sources:
            source.check()
        # Read the counters first: a change during the computation may be missing in its result.
        changes = [source.changes for source in self._sources]
        if self._made is None or self._made[0] != changes:
            self._made = changes, self._make()
        return self._made[1]


def _entry(found: Object, value: V) -> _Entry[V]:
    return _Entry(_number(version_of(found)), _uid(found), value)


def _name(found: Object) -> Name:
    metadata = found["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _uid(found: Object) -> str:
    return str(found["metadata"].get("uid", ""))


def version_of(found: Object) -> str:
    """Return the version of an object."""
    return str(found["metadata"].get("resourceVersion", ""))


def _number(version: str) -> int:
    return int(version) if version.isdecimal() else 0
