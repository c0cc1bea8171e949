"""The objects of the cluster in memory, their versions, and what has happened to them."""

from __future__ import annotations

import copy
import itertools
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .answers import Object, already_exists, expired, not_found
from .resources import Resource
from .selectors import Matches

KEPT = 1000
"""How many changes a watch can go back."""


class Change(NamedTuple):
    """Something that has happened to an object."""

    version: int
    resource: Resource
    type: str
    """``ADDED``, ``MODIFIED`` or ``DELETED``."""
    new: Object
    old: Object | None


def now() -> str:
    """Return the time as objects bear it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Store:
    """What etcd is to a cluster: objects by kind, namespace and name, each with its version.

    An object that is stored is never changed, only replaced; what is returned to be changed are
    copies. Whoever reads and then writes holds `lock` meanwhile.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.version = 1
        self._oldest = 0
        self._changes: deque[Change] = deque()
        self._objects: dict[Resource, dict[tuple[str, str], Object]] = defaultdict(dict)

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """Return an object.

        Raises:
            ApiError: 404.
        """
        with self.lock:
            try:
                return copy.deepcopy(self._objects[resource][namespace, name])
            except KeyError:
                raise not_found(resource, name) from None

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """Return an object, or None."""
        with self.lock:
            return copy.deepcopy(self._objects[resource].get((namespace, name)))

    def list(self, resource: Resource, namespace: str = "", matches: Matches | None = None) -> Any:
        """Return the objects of a kind, by namespace and name; "" means all namespaces."""
        with self.lock:
            return [
                copy.deepcopy(thing)
                for (where, _), thing in sorted(self._objects[resource].items())
                if namespace in ("", where) and (matches is None or matches(thing))
            ]

    def view(self, resource: Resource) -> list[Object]:
        """Return the objects of a kind themselves, which must not be changed."""
        with self.lock:
            return list(self._objects[resource].values())

    def everything(self) -> Iterator[tuple[Resource, Object]]:
        """Yield every object itself with its kind; they must not be changed."""
        with self.lock:
            pairs = [(r, x) for r, things in self._objects.items() for x in things.values()]
        yield from pairs

    def create(self, resource: Resource, thing: Object) -> Object:
        """Add an object; give it a version, a time and an identity.

        Raises:
            ApiError: 409, where the name is taken.
        """
        with self.lock:
            metadata = thing["metadata"]
            key = metadata.get("namespace", ""), metadata["name"]
            if key in self._objects[resource]:
                raise already_exists(resource, metadata["name"])
            metadata["uid"] = str(uuid.uuid4())
            metadata["creationTimestamp"] = now()
            return self._put(resource, "ADDED", copy.deepcopy(thing), None)

    def replace(self, resource: Resource, thing: Object) -> Object:
        """Write an object that is there; what changes nothing leaves the version as it is."""
        with self.lock:
            metadata = thing["metadata"]
            old = self.get(resource, metadata.get("namespace", ""), metadata["name"])
            metadata["resourceVersion"] = old["metadata"]["resourceVersion"]
            if thing == old:
                return old
            return self._put(resource, "MODIFIED", copy.deepcopy(thing), old)

    def change(
        self, resource: Resource, namespace: str, name: str, alter: Callable[[Object], None]
    ) -> Object | None:
        """Alter an object in place; nothing where it is not there (any more)."""
        with self.lock:
            thing = self.find(resource, namespace, name)
            if thing is None:
                return None
            alter(thing)
            return self.replace(resource, thing)

    def remove(self, resource: Resource, namespace: str, name: str) -> Object:
        """Take an object out; return its last state.

        Raises:
            ApiError: 404.
        """
        with self.lock:
            old = self.get(resource, namespace, name)
            del self._objects[resource][namespace, name]
            return self._note(resource, "DELETED", copy.deepcopy(old), old)

    def _put(self, resource: Resource, kind: str, thing: Object, old: Object | None) -> Object:
        metadata = thing["metadata"]
        self._objects[resource][metadata.get("namespace", ""), metadata["name"]] = thing
        return self._note(resource, kind, thing, old)

    def _note(self, resource: Resource, kind: str, thing: Object, old: Object | None) -> Object:
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        change = Change(self.version, resource, kind, thing, old)
        self._changes.append(change)
        if len(self._changes) > KEPT:
            self._oldest = self._changes.popleft().version
        self.changed.notify_all()
        return copy.deepcopy(thing)

    def forget_changes(self) -> None:
        """Let no watch go back: who asks for an older version is told 410 Gone."""
        with self.lock:
            self._changes.clear()
            self._oldest = self.version

    def since(self, version: int) -> list[Change]:
        """Return what has happened after a version.

        Raises:
            ApiError: 410, where that is no longer known.
        """
        with self.lock:
            if version < self._oldest:
                raise expired(version, self._oldest)
            if not self._changes or self._changes[-1].version <= version:
                return []
            recent = itertools.takewhile(lambda x: x.version > version, reversed(self._changes))
            return list(recent)[::-1]
