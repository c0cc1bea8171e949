"""What deletes objects of the cluster in memory, at once or when all that they wait for is done."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from . import answers
from .admission import admit_deletion
from .answers import Object
from .resources import NAMESPACES, PODS, Resource
from .selectors import Matches
from .store import Store, now

FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
"""Finalizers of what is deleted after its dependents, or apart from them."""


def delete(
    store: Store, resource: Resource, namespace: str, name: str, options: Mapping[str, Any]
) -> Object:
    """Delete an object, or mark it as to be deleted; return the answer.

    Args:
        store: where it is.
        resource: its kind.
        namespace: its namespace.
        name: which one.
        options: `DeleteOptions`: gracePeriodSeconds, propagationPolicy, preconditions.
    """
    with store.lock:
        thing = store.get(resource, namespace, name)
        metadata = thing["metadata"]
        admit_deletion(resource, metadata, options.get("preconditions") or {})
        policy = options.get("propagationPolicy")
        finalizers = set(metadata.get("finalizers", []))
        if policy in ("Foreground", "Orphan"):
            finalizers.add(FOREGROUND if policy == "Foreground" else ORPHAN)
        metadata |= {"finalizers": sorted(finalizers)} if finalizers else {}
        grace = _grace(resource, thing, options.get("gracePeriodSeconds"))
        if grace or finalizers or resource == NAMESPACES:
            return _mark(store, resource, thing, grace)
        if resource == PODS:
            # What is deleted at once is said to be deleted, too.
            metadata |= {"deletionTimestamp": metadata.get("deletionTimestamp", now())}
            metadata |= {"deletionGracePeriodSeconds": 0}
            thing = store.replace(resource, thing)
            store.remove(resource, namespace, name)
            return thing
        store.remove(resource, namespace, name)
        about = {"name": name, "kind": resource.plural, "uid": metadata["uid"]}
        return answers.success(about | ({"group": resource.group} if resource.group else {}))


def delete_all(
    store: Store, resource: Resource, namespace: str, matches: Matches, options: Mapping[str, Any]
) -> list[Object]:
    """Delete what a selector means; return what was there."""
    things = store.list(resource, namespace, matches)
    for thing in things:
        metadata = thing["metadata"]
        delete(store, resource, metadata.get("namespace", ""), metadata["name"], options)
    return list(things)


def _grace(resource: Resource, thing: Object, asked: int | None) -> int:
    """Return the seconds that something has to end."""
    if resource != PODS:
        return 0
    usual = thing["spec"].get("terminationGracePeriodSeconds", 30)
    grace = int(usual if asked is None else asked)
    ended = thing["status"].get("phase") in ("Succeeded", "Failed")
    return 0 if ended or not thing["spec"].get("nodeName") else max(grace, 0)


def _mark(store: Store, resource: Resource, thing: Object, grace: int) -> Object:
    """Say of an object that it is to be deleted, and when."""
    metadata = thing["metadata"]
    before = metadata.get("deletionGracePeriodSeconds")
    if "deletionTimestamp" not in metadata or (before is not None and grace < before):
        end = time.gmtime(time.time() + grace)
        metadata["deletionTimestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", end)
        if resource.generation and before is None:
            metadata["generation"] = metadata.get("generation", 1) + 1
        if resource != NAMESPACES:
            metadata["deletionGracePeriodSeconds"] = grace
    if resource == NAMESPACES:
        thing["status"]["phase"] = "Terminating"
    return store.replace(resource, thing)


def is_over(resource: Resource, thing: Object) -> bool:
    """Return whether an object that is to be deleted waits for nothing more."""
    metadata = thing["metadata"]
    return (
        "deletionTimestamp" in metadata
        and resource != NAMESPACES
        and not metadata.get("finalizers")
        and not metadata.get("deletionGracePeriodSeconds")
    )
