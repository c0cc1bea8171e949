"""What requests do to the objects of the cluster in memory."""

from __future__ import annotations

import copy
import json
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from . import answers, defaults, patches, schema
from .answers import ApiError, Cause, Object
from .resources import (
    BUILT_IN,
    DEFINITIONS,
    LEASES,
    NAMESPACES,
    PODS,
    SERVICE_ACCOUNTS,
    Resource,
)
from .selectors import Matches
from .store import Store, now

FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
# What a client cannot change of an object that is there.
_KEPT_METADATA = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
)


class Registry:
    """Creates, changes and deletes objects as the real API server does."""

    def __init__(self) -> None:
        self.store = Store()
        self._owners: dict[str, patches.Ownership] = defaultdict(patches.Ownership)

    # -- which kinds there are ---------------------------------------------------------------

    def resources(self) -> list[Resource]:
        """Return all kinds that are served."""
        found = list(BUILT_IN)
        for definition in self.store.list(DEFINITIONS):
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

    def resource(self, group: str, version: str, plural: str) -> Resource:
        """Return a kind.

        Raises:
            ApiError: 404, where it is not served.
        """
        for resource in self.resources():
            if (resource.group, resource.version, resource.plural) == (group, version, plural):
                return resource
        raise answers.no_such_path()

    # -- create ------------------------------------------------------------------------------

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
        thing = self._read(resource, namespace, body)
        metadata = thing["metadata"]
        if "generateName" in metadata and not metadata.get("name"):
            metadata["name"] = metadata["generateName"] + defaults.random_suffix()
        for key in ("uid", "resourceVersion", "deletionTimestamp", "managedFields"):
            metadata.pop(key, None)
        with self.store.lock:
            if resource.namespaced:
                self._admit_namespace(resource, namespace, metadata.get("name", ""))
            if resource.status:
                given = thing.pop("status", None)
                if resource.kind in ("Node", "PersistentVolume") and given is not None:
                    thing["status"] = given
            defaults.fill_in(resource, thing)
            thing = self._checked(resource, thing, None, strict=strict)
            if resource == PODS:
                self._admit_pod(thing)
            if resource.generation:
                metadata = thing["metadata"]
                metadata["generation"] = 1
            if dry_run:
                new = {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
                return thing | {"metadata": thing["metadata"] | new}
            created = self.store.create(resource, thing)
            self._owners[created["metadata"]["uid"]].note(manager, None, _owned_part(created))
            return created

    def _read(self, resource: Resource, namespace: str, body: Any) -> Object:
        """Return an object that was sent, with its kind and its namespace."""
        if not isinstance(body, dict):
            raise answers.bad_request("the object provided is unrecognized: must be an object")
        thing = copy.deepcopy(body)
        version, kind = thing.get("apiVersion"), thing.get("kind")
        if resource.custom and not (version and kind):
            raise answers.bad_request(_incomplete(resource, body, bool(kind)))
        if version not in (None, resource.api_version):
            raise answers.bad_request(_wrong_version(resource, str(version), str(kind)))
        if kind not in (None, resource.kind):
            if resource.custom:
                said = f'Invalid value: "{kind}": must be {resource.kind}'
                cause = Cause("kind", "FieldValueInvalid", said)
                name = thing.get("metadata", {}).get("name", "")
                raise answers.invalid(replace(resource, kind=str(kind)), name, [cause])
            raise answers.bad_request(_wrong_kind(resource, str(kind)))
        thing = {"kind": resource.kind, "apiVersion": resource.api_version} | thing
        metadata = thing["metadata"] = dict(thing.get("metadata") or {})
        if resource.namespaced:
            if metadata.setdefault("namespace", namespace) != namespace:
                raise answers.bad_request(
                    "the namespace of the provided object does not match the namespace sent on "
                    "the request"
                )
        else:
            metadata.pop("namespace", None)
        for key in ("labels", "annotations", "finalizers", "ownerReferences"):
            if not metadata.get(key, True):
                del metadata[key]
        return thing

    def _admit_namespace(self, resource: Resource, namespace: str, name: str) -> None:
        found = self.store.find(NAMESPACES, "", namespace)
        if found is None:
            raise answers.not_found(NAMESPACES, namespace)
        if found["metadata"].get("deletionTimestamp"):
            why = (
                f"unable to create new content in namespace {namespace} because it is being "
                "terminated"
            )
            raise answers.forbidden(resource, name, why)

    def _admit_pod(self, pod: Object) -> None:
        namespace, account = pod["metadata"]["namespace"], pod["spec"]["serviceAccountName"]
        if self.store.find(SERVICE_ACCOUNTS, namespace, account) is None:
            why = (
                f"error looking up service account {namespace}/{account}: serviceaccount "
                f'"{account}" not found'
            )
            raise answers.forbidden(PODS, pod["metadata"]["name"], why)

    def _checked(
        self, resource: Resource, thing: Object, old: Object | None, *, strict: bool = False
    ) -> Object:
        """Return an object as it may be stored, with the defaults of its schema."""
        if resource.custom:
            rules = resource.definition.get("schema", {}).get("openAPIV3Schema", {})
            thing, unknown = schema.pruned(thing, rules)
            if unknown and strict:
                said = ", ".join(f'unknown field "{name}"' for name in unknown)
                raise answers.bad_request(
                    f'{resource.kind} in version "{resource.version}" cannot be handled as a '
                    f"{resource.kind}: strict decoding error: {said}"
                )
            thing = schema.with_defaults(thing, rules)
            causes = schema.broken_rules(thing, rules, old)
            if causes:
                raise answers.invalid(resource, thing["metadata"].get("name", ""), causes)
        defaults.validate(resource, thing, old)
        return thing

    # -- change ------------------------------------------------------------------------------

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
        thing = self._read(resource, namespace, body)
        if thing["metadata"].get("name") != name:
            raise answers.bad_request(_wrong_name(thing["metadata"].get("name", ""), name))
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
        wanted = self._read(resource, namespace, body)
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
        self._admit_change(resource, old, metadata)
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
        new = self._checked(resource, new, old, strict=strict)
        if resource.generation and _wanted(new) != _wanted(old):
            new["metadata"]["generation"] = old["metadata"].get("generation", 1) + 1
        if dry_run:
            return new
        if manager is not None:
            uid = old["metadata"]["uid"]
            self._owners[uid].note(manager, _owned_part(old), _owned_part(new))
        if _is_over(resource, new):
            self.store.replace(resource, new)
            return self.store.remove(resource, new["metadata"].get("namespace", ""), name)
        return self.store.replace(resource, new)

    def _admit_change(self, resource: Resource, old: Object, metadata: Mapping[str, Any]) -> None:
        name, was = old["metadata"]["name"], old["metadata"]
        if metadata.get("resourceVersion") not in (None, "", was["resourceVersion"]):
            raise answers.conflict(resource, name)
        if metadata.get("uid", was["uid"]) != was["uid"]:
            why = (
                f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object "
                f"meta: {was['uid']}"
            )
            raise answers.conflict(resource, name, why)
        if metadata.get("name") != name:
            raise answers.bad_request(_wrong_name(metadata.get("name", ""), name))

    # -- delete ------------------------------------------------------------------------------

    def delete(
        self, resource: Resource, namespace: str, name: str, options: Mapping[str, Any]
    ) -> Object:
        """Delete an object, or mark it as to be deleted; return the answer.

        Args:
            resource: its kind.
            namespace: where it is.
            name: which one.
            options: `DeleteOptions`: gracePeriodSeconds, propagationPolicy, preconditions.
        """
        with self.store.lock:
            thing = self.store.get(resource, namespace, name)
            metadata = thing["metadata"]
            self._admit_deletion(resource, metadata, options.get("preconditions") or {})
            policy = options.get("propagationPolicy")
            finalizers = set(metadata.get("finalizers", []))
            if policy in ("Foreground", "Orphan"):
                finalizers.add(FOREGROUND if policy == "Foreground" else ORPHAN)
            metadata |= {"finalizers": sorted(finalizers)} if finalizers else {}
            grace = self._grace(resource, thing, options.get("gracePeriodSeconds"))
            if grace or finalizers or resource == NAMESPACES:
                return self._mark(resource, thing, grace)
            if resource == PODS:
                # What is deleted at once is said to be deleted, too.
                metadata |= {"deletionTimestamp": metadata.get("deletionTimestamp", now())}
                metadata |= {"deletionGracePeriodSeconds": 0}
                thing = self.store.replace(resource, thing)
                self.store.remove(resource, namespace, name)
                return thing
            self.store.remove(resource, namespace, name)
            about = {"name": name, "kind": resource.plural, "uid": metadata["uid"]}
            return answers.success(about | ({"group": resource.group} if resource.group else {}))

    def _admit_deletion(
        self, resource: Resource, metadata: Object, preconditions: Mapping[str, Any]
    ) -> None:
        for key, word in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
            wanted = preconditions.get(key)
            if wanted not in (None, metadata[key]):
                why = (
                    f"the {word} in the precondition ({wanted}) does not match the {word} in "
                    f"record ({metadata[key]}). The object might have been deleted and then "
                    "recreated"
                )
                raise answers.conflict(
                    replace(resource, plural=resource.kind), metadata["name"], why
                )

    def _grace(self, resource: Resource, thing: Object, asked: int | None) -> int:
        """Return the seconds that something has to end."""
        if resource != PODS:
            return 0
        usual = thing["spec"].get("terminationGracePeriodSeconds", 30)
        grace = int(usual if asked is None else asked)
        ended = thing["status"].get("phase") in ("Succeeded", "Failed")
        return 0 if ended or not thing["spec"].get("nodeName") else max(grace, 0)

    def _mark(self, resource: Resource, thing: Object, grace: int) -> Object:
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
        return self.store.replace(resource, thing)

    def delete_all(
        self, resource: Resource, namespace: str, matches: Matches, options: Mapping[str, Any]
    ) -> list[Object]:
        """Delete what a selector means; return what was there."""
        things = self.store.list(resource, namespace, matches)
        for thing in things:
            metadata = thing["metadata"]
            self.delete(resource, metadata.get("namespace", ""), metadata["name"], options)
        return list(things)

    # -- pods --------------------------------------------------------------------------------

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
        self.delete(PODS, namespace, name, body.get("deleteOptions") or {})
        return answers.success(code=201)


def set_condition(thing: Object, kind: str, status: str, **more: str | None) -> None:
    """Set a condition of an object; the time is that of its last change."""
    conditions = thing.setdefault("status", {}).setdefault("conditions", [])
    found = next((c for c in conditions if c["type"] == kind), None)
    if found is None:
        found = {"type": kind, "status": "", "lastProbeTime": None}
        conditions.append(found)
    if found["status"] != status:
        found |= {"status": status, "lastTransitionTime": now()}
    for key in ("reason", "message"):
        found.pop(key, None)
        if more.get(key):
            found[key] = more[key]


def _incomplete(resource: Resource, body: Any, has_kind: bool) -> str:
    text = json.dumps(body, separators=(",", ":"))
    missing = "apiVersion not set" if has_kind else f"Object 'Kind' is missing in '{text}'"
    said = f"the object provided is unrecognized (must be of type {resource.kind})"
    return f"{said}: {missing} ({text[:30]} ...)"


def _wrong_name(name: str, wanted: str) -> str:
    return f"the name of the object ({name}) does not match the name on the URL ({wanted})"


def _wrong_version(resource: Resource, version: str, kind: str) -> str:
    if resource.custom:
        return (
            f"the API version in the data ({version}) does not match the expected API version "
            f"({resource.api_version})"
        )
    return (
        f'{kind} in version "{version}" cannot be handled as a {resource.kind}: no kind "{kind}" '
        f'is registered for version "{version}" in scheme '
        '"k8s.io/kubernetes/pkg/api/legacyscheme/scheme.go:30"'
    )


def _wrong_kind(resource: Resource, kind: str) -> str:
    said = f'{kind} in version "{resource.version}" cannot be handled as a {resource.kind}'
    inside, outside = f"core.{resource.kind}", f"{resource.version}.{kind}"
    return f"{said}: converting ({outside}) to ({inside}): unknown conversion"


def _owned_part(thing: Object) -> Object:
    """Return what managers own of an object."""
    metadata = thing.get("metadata", {})
    keys = ("labels", "annotations", "finalizers", "ownerReferences")
    rest = {k: v for k, v in thing.items() if k not in ("apiVersion", "kind", "metadata")}
    return {"metadata": {k: metadata[k] for k in keys if k in metadata}} | rest


def _wanted(thing: Object) -> Object:
    return {key: value for key, value in thing.items() if key not in ("metadata", "status")}


def _is_over(resource: Resource, thing: Object) -> bool:
    """Whether an object that is to be deleted waits for nothing more."""
    metadata = thing["metadata"]
    return (
        "deletionTimestamp" in metadata
        and resource != NAMESPACES
        and not metadata.get("finalizers")
        and not metadata.get("deletionGracePeriodSeconds")
    )
