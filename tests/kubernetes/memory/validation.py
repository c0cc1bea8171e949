"""What of the objects that requests bring is accepted, whatever there is in the cluster."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

from . import answers, defaults, schema
from .answers import Cause, Object
from .resources import Resource


def read(resource: Resource, namespace: str, body: Any) -> Object:
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


def checked(
    resource: Resource, thing: Object, old: Object | None, *, strict: bool = False
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


def _incomplete(resource: Resource, body: Any, has_kind: bool) -> str:
    text = json.dumps(body, separators=(",", ":"))
    missing = "apiVersion not set" if has_kind else f"Object 'Kind' is missing in '{text}'"
    said = f"the object provided is unrecognized (must be of type {resource.kind})"
    return f"{said}: {missing} ({text[:30]} ...)"


def check_name(name: str, wanted: str) -> None:
    """Refuse a request whose object and URL name different objects."""
    if name != wanted:
        raise answers.bad_request(
            f"the name of the object ({name}) does not match the name on the URL ({wanted})"
        )


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
