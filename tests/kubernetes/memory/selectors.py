"""Label and field selectors of lists and watches."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from .answers import bad_request
from .resources import PODS, Resource

Matches = Callable[[Mapping[str, Any]], bool]
_SET = re.compile(r"^(\S+)\s+(in|notin)\s+\(([^)]*)\)$")
_FIELDS = {"metadata.name": ("metadata", "name"), "metadata.namespace": ("metadata", "namespace")}
_POD_FIELDS = {
    "spec.nodeName": ("spec", "nodeName"),
    "spec.restartPolicy": ("spec", "restartPolicy"),
    "status.phase": ("status", "phase"),
    "status.podIP": ("status", "podIP"),
}
_EVENT_FIELDS = {
    "involvedObject.name": ("involvedObject", "name"),
    "involvedObject.kind": ("involvedObject", "kind"),
    "involvedObject.uid": ("involvedObject", "uid"),
    "reason": ("reason",),
    "type": ("type",),
}


def matcher(resource: Resource, labels: str, fields: str) -> Matches:
    """Return what tells whether an object is meant.

    Args:
        resource: the kind of the objects.
        labels: a label selector, such as "job=a,replica in (0,1),!done"; "" means all.
        fields: a field selector, such as "spec.nodeName=n1".

    Raises:
        ApiError: 400, where one cannot be understood.
    """
    rules = [_label_rule(part) for part in _parts(labels)]
    rules += [_field_rule(resource, part) for part in _parts(fields)]
    return lambda thing: all(rule(thing) for rule in rules)


def _parts(selector: str) -> list[str]:
    """Split at commas outside of parentheses."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", selector) if part.strip()]


def _label_rule(part: str) -> Matches:
    def label(thing: Mapping[str, Any], key: str) -> str | None:
        return (thing["metadata"].get("labels") or {}).get(key)

    if found := _SET.match(part):
        key, word, text = found.groups()
        values = {value.strip() for value in text.split(",")}
        if word == "in":
            return lambda thing: label(thing, key) in values
        return lambda thing: label(thing, key) not in values
    if "!=" in part:
        key, value = (text.strip() for text in part.split("!=", 1))
        return lambda thing: label(thing, key) != value
    if "=" in part:
        key, value = (text.strip() for text in part.replace("==", "=").split("=", 1))
        return lambda thing: label(thing, key) == value
    if part.startswith("!"):
        return lambda thing: label(thing, part[1:].strip()) is None
    if re.fullmatch(r"[A-Za-z0-9][\w./-]*", part):
        return lambda thing: label(thing, part) is not None
    raise bad_request(f"unable to parse requirement: {part!r}")


def _field_rule(resource: Resource, part: str) -> Matches:
    negative = "!=" in part
    key, sign, value = part.partition("!=" if negative else "=")
    value = value.removeprefix("=")
    known = dict(_FIELDS)
    if resource == PODS:
        known |= _POD_FIELDS
    if resource.kind == "Event":
        known |= _EVENT_FIELDS
    if not sign:
        raise bad_request(f"invalid selector: {part!r}; can't understand {part!r}")
    if key not in known:
        if resource.group and not resource.custom:
            raise bad_request(f'"{key}" is not a known field selector: only {_named(known)}')
        raise bad_request(f"field label not supported: {key}")

    def rule(thing: Mapping[str, Any]) -> bool:
        found: Any = thing
        for step in known[key]:
            found = (found or {}).get(step)
        return ((found or "") == value) != negative

    return rule


def _named(known: Mapping[str, object]) -> str:
    return ", ".join(f'"{name}"' for name in sorted(known))
