"""The four ways to patch: JSON patch, merge patch, strategic merge patch, server-side apply.

Strategic merge and apply know of some lists that their entries have a name in them, and change
those entry by entry; all other lists are replaced whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .answers import ApiError, Object, bad_request

JSON, MERGE = "application/json-patch+json", "application/merge-patch+json"
STRATEGIC, APPLY = "application/strategic-merge-patch+json", "application/apply-patch+yaml"

# What tells the entries of a list apart, by the name of the list.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "ownerReferences": "uid",
    "conditions": "type",
    "addresses": "type",
    "taints": "key",
    "containerStatuses": "name",
}
Path = tuple[Any, ...]
_MISSING = object()


def merge_patch(target: Any, patch: Any) -> Any:
    """Return what a JSON merge patch (RFC 7386) makes of a value."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def strategic_patch(target: Any, patch: Any, name: str = "") -> Any:
    """Return what a strategic merge patch makes of a value; `name` is that of its field."""
    if isinstance(patch, dict):
        if patch.get("$patch") == "replace":
            return {key: value for key, value in patch.items() if key != "$patch"}
        merged = dict(target) if isinstance(target, dict) else {}
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            elif not key.startswith("$"):
                merged[key] = strategic_patch(merged.get(key), value, key)
        return merged
    merge_key = MERGE_KEYS.get(name)
    if not isinstance(patch, list) or merge_key is None:
        return copy.deepcopy(patch)
    if any(isinstance(entry, dict) and entry.get("$patch") == "replace" for entry in patch):
        return [entry for entry in patch if entry != {"$patch": "replace"}]
    entries = {entry.get(merge_key): entry for entry in target or []}
    for entry in patch:
        if merge_key not in entry:
            raise bad_request(f"map: {entry} does not contain declared merge key: {merge_key}")
        if entry.get("$patch") == "delete":
            entries.pop(entry[merge_key], None)
        else:
            entries[entry[merge_key]] = strategic_patch(entries.get(entry[merge_key]), entry)
    return list(entries.values())


def json_patch(target: Any, operations: Sequence[Mapping[str, Any]]) -> Any:
    """Return what a JSON patch (RFC 6902) makes of a value.

    Raises:
        ApiError: 422, where an operation finds nothing, or a test does not hold.
    """
    document = copy.deepcopy(target)
    for operation in operations:
        kind, path = operation.get("op"), str(operation.get("path", ""))
        steps = [step.replace("~1", "/").replace("~0", "~") for step in path.split("/")[1:]]
        if kind == "test":
            if _at(document, steps, path, kind) != operation.get("value"):
                raise _unpatched(f"testing path {path} failed")
        elif kind in ("add", "replace", "remove"):
            if kind != "add":
                _at(document, steps, path, kind)
            _write(document, steps, path, kind, copy.deepcopy(operation.get("value")))
        elif kind in ("move", "copy"):
            source = str(operation["from"])
            origin = [step.replace("~1", "/").replace("~0", "~") for step in source.split("/")[1:]]
            value = copy.deepcopy(_at(document, origin, source, kind))
            if kind == "move":
                _write(document, origin, source, "remove", None)
            _write(document, steps, path, "add", value)
        else:
            raise _unpatched(f"Unexpected kind: {kind}")
    return document


def _unpatched(message: str) -> ApiError:
    text = "the server rejected our request due to an error in our request"
    error = ApiError(422, "Invalid", text, {})
    error.add_note(message)
    return error


def _at(document: Any, steps: Sequence[str], path: str, kind: str) -> Any:
    for step in steps:
        try:
            document = document[int(step)] if isinstance(document, list) else document[step]
        except (KeyError, IndexError, ValueError, TypeError):
            raise _unpatched(
                f"{kind} operation does not apply: doc is missing key: {path}"
            ) from None
    return document


def _write(document: Any, steps: Sequence[str], path: str, kind: str, value: Any) -> None:
    parent, last = _at(document, steps[:-1], path, kind), steps[-1]
    if isinstance(parent, list):
        if kind == "remove":
            del parent[int(last)]
        elif kind == "replace":
            parent[int(last)] = value
        else:
            parent.insert(len(parent) if last == "-" else int(last), value)
    elif kind == "remove":
        del parent[last]
    else:
        parent[last] = value


class Ownership:
    """Who owns which fields of one object, for server-side apply.

    A field is owned by whom it was set by; to apply another value to the field of someone else is a
    conflict unless it is forced, and what a manager no longer applies goes.
    """

    def __init__(self) -> None:
        self._applied: dict[str, set[Path]] = {}
        self._updated: dict[str, set[Path]] = {}

    def note(self, manager: str, old: Object | None, new: Object) -> None:
        """Record what a manager has set otherwise than by apply."""
        before, after = dict(_leaves(old or {})), dict(_leaves(new))
        changed = {path for path, value in after.items() if before.get(path, _MISSING) != value}
        for owners in (self._applied, self._updated):
            for paths in owners.values():
                paths -= changed | (before.keys() - after.keys())
        self._updated.setdefault(manager, set()).update(changed)

    def apply(
        self,
        manager: str,
        current: Object | None,
        wanted: Object,
        *,
        force: bool,
        conflict: Callable[[list[tuple[str, str]]], ApiError],
    ) -> Object:
        """Return what applying makes of an object, and record who owns what then.

        Args:
            manager: who applies.
            current: the object as it is; None: it is to be created.
            wanted: what is applied.
            force: take over fields that others own.
            conflict: makes an error of pairs of a manager and a field.

        Raises:
            ApiError: 409, on a conflict.
        """
        there = dict(_leaves(current or {}))
        claims = {path: value for path, value in _leaves(wanted) if not _is_identity(path)}
        others = [
            (other, path)
            for owners in (self._applied, self._updated)
            for other, paths in owners.items()
            if not (owners is self._applied and other == manager)
            for path in sorted(paths & claims.keys(), key=str)
            if there.get(path, _MISSING) != claims[path]
        ]
        if others and not force:
            raise conflict([(other, _dotted(path)) for other, path in others])
        for owners in (self._applied, self._updated):
            for _, path in others:
                for other, paths in owners.items():
                    if other != manager or owners is self._updated:
                        paths.discard(path)
        merged = strategic_patch(current or {}, wanted)
        for path in self._applied.get(manager, set()) - claims.keys():
            if not self._owned(path, manager):
                _drop(merged, path)
        self._applied[manager] = set(claims)
        return merged

    def _owned(self, path: Path, manager: str) -> bool:
        return any(
            path in paths
            for owners in (self._applied, self._updated)
            for other, paths in owners.items()
            if not (owners is self._applied and other == manager)
        )


def _leaves(value: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Return the fields of an object that have no fields in them; entries of lists by their key."""
    if isinstance(value, dict) and value:
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, (*path, key))]
    merge_key = MERGE_KEYS.get(path[-1]) if path and isinstance(path[-1], str) else None
    if isinstance(value, list) and merge_key and all(isinstance(x, dict) for x in value):
        return [
            leaf
            for entry in value
            for leaf in _leaves(entry, (*path, (merge_key, entry.get(merge_key))))
        ]
    return [(path, value)]


def _is_identity(path: Path) -> bool:
    """Whether a field says which object is meant, and so belongs to nobody."""
    named = path[:2] in (("metadata", "name"), ("metadata", "namespace"))
    entry = len(path) > 1 and isinstance(path[-2], tuple) and path[-2][0] == path[-1]
    return named or entry or path in (("apiVersion",), ("kind",))


def _dotted(path: Path) -> str:
    steps = [f'[{s[0]}="{s[1]}"]' if isinstance(s, tuple) else f".{s}" for s in path]
    return "".join(steps)


def _drop(value: Any, path: Path) -> None:
    """Take a field out, and what is empty then."""
    trail = []
    for step in path[:-1]:
        trail.append((value, step))
        if isinstance(step, tuple):
            value = next((entry for entry in value or [] if entry.get(step[0]) == step[1]), None)
        else:
            value = value.get(step) if isinstance(value, dict) else None
        if value is None:
            return
    if isinstance(value, dict):
        value.pop(path[-1], None)
    for parent, step in reversed(trail):
        if isinstance(step, tuple):
            entry = next((x for x in parent if x.get(step[0]) == step[1]), None)
            if entry is not None and set(entry) <= {step[0]}:
                parent.remove(entry)
        elif isinstance(parent, dict) and parent.get(step) in ({}, []):
            del parent[step]
