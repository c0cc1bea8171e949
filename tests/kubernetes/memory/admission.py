"""What requests may do, given what there is in the cluster in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import answers
from .answers import Object
from .resources import NAMESPACES, PODS, SERVICE_ACCOUNTS, Resource
from .store import Store
from .validation import check_name


def admit_to_namespace(store: Store, resource: Resource, namespace: str, name: str) -> None:
    """Refuse an object whose namespace is not there, or is being deleted."""
    found = store.find(NAMESPACES, "", namespace)
    if found is None:
        raise answers.not_found(NAMESPACES, namespace)
    if found["metadata"].get("deletionTimestamp"):
        why = (
            f"unable to create new content in namespace {namespace} because it is being terminated"
        )
        raise answers.forbidden(resource, name, why)


def admit_pod(store: Store, pod: Object) -> None:
    """Refuse a pod whose service account is not there."""
    namespace, account = pod["metadata"]["namespace"], pod["spec"]["serviceAccountName"]
    if store.find(SERVICE_ACCOUNTS, namespace, account) is None:
        why = (
            f"error looking up service account {namespace}/{account}: serviceaccount "
            f'"{account}" not found'
        )
        raise answers.forbidden(PODS, pod["metadata"]["name"], why)


def admit_change(resource: Resource, old: Object, metadata: Mapping[str, Any]) -> None:
    """Refuse a change that was meant for another version of an object, or for another one."""
    name, was = old["metadata"]["name"], old["metadata"]
    if metadata.get("resourceVersion") not in (None, "", was["resourceVersion"]):
        raise answers.conflict(resource, name)
    if metadata.get("uid", was["uid"]) != was["uid"]:
        why = (
            f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object "
            f"meta: {was['uid']}"
        )
        raise answers.conflict(resource, name, why)
    check_name(metadata.get("name", ""), name)


def admit_deletion(resource: Resource, metadata: Object, preconditions: Mapping[str, Any]) -> None:
    """Refuse a deletion whose preconditions do not hold."""
    for key, word in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
        wanted = preconditions.get(key)
        if wanted not in (None, metadata[key]):
            why = (
                f"the {word} in the precondition ({wanted}) does not match the {word} in "
                f"record ({metadata[key]}). The object might have been deleted and then "
                "recreated"
            )
            raise answers.conflict(replace(resource, plural=resource.kind), metadata["name"], why)
