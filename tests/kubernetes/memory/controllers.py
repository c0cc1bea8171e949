"""The controllers of the cluster in memory: owners and dependents, namespaces, nodes that go."""

from __future__ import annotations

import calendar
import contextlib
import time

from .answers import ApiError, Object
from .deletion import FOREGROUND, ORPHAN, delete
from .registry import Registry
from .resources import DEFINITIONS, NAMESPACES, NODES, PODS, SERVICE_ACCOUNTS, Resource
from .store import Change

BACKGROUND = {"propagationPolicy": "Background"}
FORCED = {"gracePeriodSeconds": 0}


class Controllers:
    """Does what follows from changes, as the controller manager of a cluster does.

    Args:
        registry: what it acts on.
        orphan_seconds: how long pods stay whose node has been deleted.
    """

    def __init__(self, registry: Registry, orphan_seconds: float = 0.5) -> None:
        self._registry = registry
        self._orphan_seconds = orphan_seconds
        self._orphans: dict[str, float] = {}

    def follow(self, changes: list[Change]) -> None:
        """Act on changes; without any, on what is due by now."""
        for change in changes:
            if change.resource == NAMESPACES and change.type == "ADDED":
                self.make_service_account(change.new["metadata"]["name"])
        if any(self._concerns_owners(change) for change in changes):
            self._collect()
        if any(x["status"]["phase"] == "Terminating" for x in self._store.view(NAMESPACES)):
            self._empty_namespaces()
        self._remove_undeclared(changes)
        self._evict_from_tainted()
        self._remove_orphaned_pods()

    @property
    def _store(self):
        return self._registry.store

    def make_service_account(self, namespace: str) -> None:
        """Give a namespace the account that pods need."""
        with contextlib.suppress(ApiError):
            account = {"metadata": {"name": "default"}}
            self._registry.create(SERVICE_ACCOUNTS, namespace, account)

    @staticmethod
    def _concerns_owners(change: Change) -> bool:
        metadata = change.new["metadata"]
        owned = change.type == "ADDED" and "ownerReferences" in metadata
        waits = {FOREGROUND, ORPHAN} & set(metadata.get("finalizers", []))
        return change.type == "DELETED" or owned or bool(waits)

    def _collect(self) -> None:
        """Delete what has no owner left, and let go of owners whose dependents are gone."""
        with self._store.lock:
            things = list(self._store.everything())
            there = {thing["metadata"]["uid"] for _, thing in things}
            dependents: dict[str, list[tuple[Resource, Object]]] = {}
            for resource, thing in things:
                owners = thing["metadata"].get("ownerReferences", [])
                for owner in owners:
                    dependents.setdefault(owner["uid"], []).append((resource, thing))
                if owners and not any(owner["uid"] in there for owner in owners):
                    self._delete(resource, thing, BACKGROUND)
            for resource, thing in things:
                waits = set(thing["metadata"].get("finalizers", []))
                mine = dependents.get(thing["metadata"]["uid"], [])
                if FOREGROUND in waits:
                    for kind, dependent in mine:
                        if "deletionTimestamp" not in dependent["metadata"]:
                            self._delete(kind, dependent, {"propagationPolicy": "Foreground"})
                    if not mine:
                        self._finish(resource, thing, FOREGROUND)
                if ORPHAN in waits:
                    for kind, dependent in mine:
                        self._disown(kind, dependent, thing["metadata"]["uid"])
                    self._finish(resource, thing, ORPHAN)

    def _delete(self, resource: Resource, thing: Object, options: Object) -> None:
        metadata = thing["metadata"]
        with contextlib.suppress(ApiError):
            where = metadata.get("namespace", ""), metadata["name"]
            delete(self._registry.store, resource, *where, options)

    def _finish(self, resource: Resource, thing: Object, finalizer: str) -> None:
        metadata = thing["metadata"]
        left = [name for name in metadata["finalizers"] if name != finalizer]
        patch = {"metadata": {"finalizers": left or None}}
        with contextlib.suppress(ApiError):
            self._registry.patch(
                resource,
                metadata.get("namespace", ""),
                metadata["name"],
                patch,
                "application/merge-patch+json",
            )

    def _disown(self, resource: Resource, thing: Object, uid: str) -> None:
        def alter(found: Object) -> None:
            owners = [x for x in found["metadata"]["ownerReferences"] if x["uid"] != uid]
            found["metadata"]["ownerReferences"] = owners
            if not owners:
                del found["metadata"]["ownerReferences"]

        metadata = thing["metadata"]
        self._store.change(resource, metadata.get("namespace", ""), metadata["name"], alter)

    def _empty_namespaces(self) -> None:
        """Delete what is in namespaces that are to be deleted, and then these."""
        with self._store.lock:
            ending = {
                thing["metadata"]["name"]
                for thing in self._store.view(NAMESPACES)
                if thing["status"]["phase"] == "Terminating"
            }
            left = [
                (resource, thing)
                for resource, thing in self._store.everything()
                if thing["metadata"].get("namespace") in ending
            ]
            for resource, thing in left:
                if "deletionTimestamp" not in thing["metadata"]:
                    self._delete(resource, thing, BACKGROUND)
            still = {thing["metadata"].get("namespace") for _, thing in self._store.everything()}
            for name in ending - still:
                self._store.remove(NAMESPACES, "", name)

    def _remove_undeclared(self, changes: list[Change]) -> None:
        """Delete the resources of CustomResourceDefinitions that have gone."""
        for change in changes:
            if change.resource == DEFINITIONS and change.type == "DELETED":
                spec = change.new["spec"]
                for resource, thing in list(self._store.everything()):
                    if (resource.group, resource.kind) == (spec["group"], spec["names"]["kind"]):
                        self._delete(resource, thing, BACKGROUND)

    def _evict_from_tainted(self) -> None:
        """Delete pods of nodes that are tainted and that they do not tolerate (any longer)."""
        for node in self._store.view(NODES):
            taints = [
                t for t in node.get("spec", {}).get("taints", []) if t["effect"] == "NoExecute"
            ]
            if not taints:
                continue
            for pod in self._store.view(PODS):
                here = pod["spec"].get("nodeName") == node["metadata"]["name"]
                stays = "deletionTimestamp" not in pod["metadata"]
                if here and stays and any(_is_evicted(pod, taint) for taint in taints):
                    self._delete(PODS, pod, {})

    def _remove_orphaned_pods(self) -> None:
        """Take out pods whose node is not there any more."""
        nodes = {node["metadata"]["name"] for node in self._store.view(NODES)}
        now = time.monotonic()
        orphans = {
            pod["metadata"]["uid"]: pod
            for pod in self._store.view(PODS)
            if pod["spec"].get("nodeName", "") not in (nodes | {""})
        }
        self._orphans = {uid: self._orphans.get(uid, now) for uid in orphans}
        for uid, pod in orphans.items():
            if now - self._orphans[uid] >= self._orphan_seconds:
                self._delete(PODS, pod, FORCED)


def _is_evicted(pod: Object, taint: Object) -> bool:
    waits = [
        toleration.get("tolerationSeconds", float("inf"))
        for toleration in pod["spec"].get("tolerations", [])
        if toleration.get("key") in (None, taint["key"])
        and toleration.get("effect") in (None, "", "NoExecute")
        and (
            toleration.get("operator") == "Exists"
            or toleration.get("value", "") == taint.get("value", "")
        )
    ]
    since = (
        calendar.timegm(time.strptime(taint["timeAdded"], "%Y-%m-%dT%H:%M:%SZ"))
        if "timeAdded" in taint
        else 0
    )
    return not waits or time.time() - since >= min(waits)
