"""Which kinds of objects the cluster in memory serves: its own, and those that were defined."""

from __future__ import annotations

from . import answers
from .resources import BUILT_IN, DEFINITIONS, Resource
from .store import Store


def served(store: Store) -> list[Resource]:
    """Return all kinds that are served."""
    found = list(BUILT_IN)
    for definition in store.list(DEFINITIONS):
        spec = definition["spec"]
        found += [
            Resource(
                spec["group"],
                version["name"],
                spec["names"]["plural"],
                spec["names"]["kind"],
                namespaced=spec["scope"] == "Namespaced",
                status="status" in version.get("subresources", {}),
                generation=True,
                custom=True,
                definition=version,
            )
            for version in spec["versions"]
            if version.get("served", True)
        ]
    return found


def find(store: Store, group: str, version: str, plural: str) -> Resource:
    """Return a kind.

    Raises:
        ApiError: 404, where it is not served.
    """
    for resource in served(store):
        if (resource.group, resource.version, resource.plural) == (group, version, plural):
            return resource
    raise answers.no_such_path()
