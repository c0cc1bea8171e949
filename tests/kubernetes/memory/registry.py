"""What requests make of the objects of the cluster in memory."""

from __future__ import annotations

import copy
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from . import admission, answers, defaults, patches, validation
from .answers import ApiError, Cause, Object
from .conditions import set_condition
from .deletion import delete, is_over
from .resources import DEFINITIONS, LEASES, PODS, Resource
from .store import Store, now

# What a client cannot change of an object that is there.
_KEPT_METADATA = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
)


class Registry:
    """Creates and changes objects as the real API server does."""

    def __init__(self) -> None:
        self.store = Store()
        self._owners: dict[str, patches.Ownership] = defaultdict(patches.Ownership)

    def create(
        self,
        resource: Resource,
        namespace: str,
        body: Any,
        *,
        manager: str = "unknown",
        strict: bool = False,
        dry_run: bool = False,
    ) -> Object:
        """Create an object; return it as it is stored."""
        thing = validation.read(resource, namespace, body)
        metadata = thing["metadata"]
        if "generateName" in metadata and not metadata.get("name"):
            metadata["name"] = metadata["generateName"] + defaults.random_suffix()
        for key in ("uid", "resourceVersion", "deletionTimestamp", "managedFields"):
            metadata.pop(key, None)
        with self.store.lock:
            if resource.namespaced:
                admission.admit_to_namespace(
                    self.store, resource, namespace, metadata.get("name", "")
                )
            if resource.status:
                given = thing.pop("status", None)
                if resource.kind in ("Node", "PersistentVolume") and given is not None:
                    thing["status"] = given
            defaults.fill_in(resource, thing)
            thing = validation.checked(resource, thing, None, strict=strict)
            if resource == PODS:
                admission.admit_pod(self.store, thing)
            if resource.generation:
                metadata = thing["metadata"]
                metadata["generation"] = 1
            if dry_run:
                new = {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
                return thing | {"metadata": thing["metadata"] | new}
            created = self.store.create(resource, thing)
            self._owners[created["metadata"]["uid"]].note(manager, None, _owned_part(created))
            return created

    def replace(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Any,
        *,
        status: bool = False,
        manager: str = "unknown",
        strict: bool = False,
    ) -> Object:
        """Put an object, or its status, in the place of what is there."""
        thing = validation.read(resource, namespace, body)
        validation.check_name(thing["metadata"].get("name", ""), name)
        with self.store.lock:
            old = self.store.get(resource, namespace, name)
            if "resourceVersion" not in thing["metadata"] and (
                resource.custom or resource in (LEASES, DEFINITIONS)
            ):
                zero = "0" if resource.custom else "0x0"
                said = f"Invalid value: {zero}: must be specified for an update"
                cause = Cause("metadata.resourceVersion", "FieldValueInvalid", said)
                raise answers.invalid(replace(resource, kind=resource.plural), name, [cause])
            return self._write(resource, old, thing, status=status, manager=manager, strict=strict)

    def patch(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Any,
        kind: str,
        *,
        status: bool = False,
        manager: str = "unknown",
        force: bool = False,
        strict: bool = False,
        dry_run: bool = False,
    ) -> tuple[int, Object]:
        """Patch an object, or its status; return the HTTP status and the object.

        Args:
            kind: the content type, which says what kind of a patch it is.
        """
        if kind == patches.APPLY:
            return self._apply(
                resource, namespace, name, body, status=status, manager=manager, force=force
            )
        if kind == patches.STRATEGIC and resource.custom:
            raise ApiError(
                415,
                "UnsupportedMediaType",
                "the body of the request was in an unknown format - accepted media types "
                "include: application/json-patch+json, application/merge-patch+json, "
                "application/apply-patch+yaml",
            )
        make: Callable[[Any, Any], Any] = {
            patches.JSON: patches.json_patch,
            patches.MERGE: patches.merge_patch,
            patches.STRATEGIC: patches.strategic_patch,
        }[kind]
        with self.store.lock:
            old = self.store.get(resource, namespace, name)
            new = make(old, body)
            return 200, self._write(
                resource, old, new, status=status, manager=manager, strict=strict, dry_run=dry_run
            )

    def _apply(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Any,
        *,
        status: bool,
        manager: str,
        force: bool,
    ) -> tuple[int, Object]:
        wanted = validation.read(resource, namespace, body)
        wanted["metadata"].setdefault("name", name)

        def refused(fields: list[tuple[str, str]]) -> ApiError:
            said = f'conflict with "{fields[0][0]}": {fields[0][1]}'
            if len(fields) > 1:
                said = f'conflicts with "{fields[0][0]}": ' + ", ".join(f for _, f in fields)
            causes = [
                {"reason": "FieldManagerConflict", "message": f'conflict with "{who}"', "field": f}
                for who, f in fields
            ]
            number = f"{len(fields)} conflict" + ("s" if len(fields) > 1 else "")
            text = f"Apply failed with {number}: {said}"
            return ApiError(409, "Conflict", text, {"causes": causes})

        with self.store.lock:
            old = self.store.find(resource, namespace, name)
            if old is None:
                if status:
                    raise answers.not_found(resource, name)
                made = self.create(resource, namespace, wanted)
                owners = self._owners[made["metadata"]["uid"]] = patches.Ownership()
                owners.apply(manager, None, _owned_part(wanted), force=True, conflict=refused)
                return 201, made
            owners = self._owners[old["metadata"]["uid"]]
            before = copy.deepcopy(owners)
            merged = owners.apply(
                manager, _owned_part(old), _owned_part(wanted), force=force, conflict=refused
            )
            new = copy.deepcopy(old)
            new["metadata"] |= {k: merged["metadata"].get(k) for k in ("labels", "annotations")}
            new["metadata"] = {k: v for k, v in new["metadata"].items() if v is not None}
            for key in ("finalizers", "ownerReferences"):
                if key in merged["metadata"]:
                    new["metadata"][key] = merged["metadata"][key]
            kept = {k: v for k, v in merged.items() if k not in ("metadata", "status")}
            new = {k: new[k] for k in ("apiVersion", "kind", "metadata")} | kept
            if "status" in merged or "status" in old:
                new["status"] = merged.get("status") if status else old.get("status")
            try:
                return 200, self._write(resource, old, new, status=status, manager=None)
            except ApiError:
                self._owners[old["metadata"]["uid"]] = before
                raise

    def _write(
        self,
        resource: Resource,
        old: Object,
        new: Object,
        *,
        status: bool,
        manager: str | None,
        strict: bool = False,
        dry_run: bool = False,
    ) -> Object:
        """Store a changed object; keep what its way of being changed may not touch."""
        new = copy.deepcopy(new)
        name, metadata = old["metadata"]["name"], new["metadata"]
        admission.admit_change(resource, old, metadata)
        if status:
            changed = copy.deepcopy(old)
            changed["status"] = new.get("status", {})
            if not resource.custom:  # kubelets set labels and conditions in one request
                for key in ("labels", "annotations"):
                    if key in metadata:
                        changed["metadata"][key] = metadata[key]
            new = changed
            defaults.complete(resource, new)
        elif resource.status:
            new = {key: value for key, value in new.items() if key != "status"}
            if "status" in old:
                new["status"] = old["status"]
        for key in _KEPT_METADATA:
            new["metadata"].pop(key, None)
            if key in old["metadata"]:
                new["metadata"][key] = old["metadata"][key]
        for key in ("labels", "annotations", "finalizers", "ownerReferences"):
            if not new["metadata"].get(key, True):
                del new["metadata"][key]
        new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
        new = validation.checked(resource, new, old, strict=strict)
        if resource.generation and _wanted(new) != _wanted(old):
            new["metadata"]["generation"] = old["metadata"].get("generation", 1) + 1
        if dry_run:
            return new
        if manager is not None:
            uid = old["metadata"]["uid"]
            self._owners[uid].note(manager, _owned_part(old), _owned_part(new))
        if is_over(resource, new):
            self.store.replace(resource, new)
            return self.store.remove(resource, new["metadata"].get("namespace", ""), name)
        return self.store.replace(resource, new)

    def bind(self, namespace: str, name: str, node: str) -> Object:
        """Put a pod on a node, as the scheduler of the cluster does."""
        with self.store.lock:
            pod = self.store.get(PODS, namespace, name)
            if pod["spec"].get("nodeName"):
                why = f'pod {name} is already assigned to node "{pod["spec"]["nodeName"]}"'
                raise answers.conflict(replace(PODS, plural="pods/binding"), name, why)
            pod["spec"]["nodeName"] = node
            set_condition(pod, "PodScheduled", "True")
            self.store.replace(PODS, pod)
            return answers.success(code=201)

    def evict(self, namespace: str, name: str, body: Mapping[str, Any]) -> Object:
        """Evict a pod."""
        delete(self.store, PODS, namespace, name, body.get("deleteOptions") or {})
        return answers.success(code=201)


def _owned_part(thing: Object) -> Object:
    """Return what managers own of an object."""
    metadata = thing.get("metadata", {})
    keys = ("labels", "annotations", "finalizers", "ownerReferences")
    rest = {k: v for k, v in thing.items() if k not in ("apiVersion", "kind", "metadata")}
    return {"metadata": {k: metadata[k] for k in keys if k in metadata}} | rest


def _wanted(thing: Object) -> Object:
    return {key: value for key, value in thing.items() if key not in ("metadata", "status")}
