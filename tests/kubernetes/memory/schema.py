"""Custom resources: defaults, what the schema does not know, and what breaks its rules."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cel

from .answers import Cause, Object

Schema = Mapping[str, Any]
_META = ("apiVersion", "kind", "metadata")
# After these, rules in CEL are not looked at.
_BLOCKING = (
    "FieldValueNotSupported",
    "FieldValueRequired",
    "FieldValueTooLong",
    "FieldValueTooMany",
    "FieldValueTypeInvalid",
)
_UNCHECKED = (
    "Invalid value: null: some validation rules were not checked because the object was invalid; "
    "correct the existing errors to complete validation"
)
_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda x: isinstance(x, dict),
    "array": lambda x: isinstance(x, list),
    "string": lambda x: isinstance(x, str),
    "boolean": lambda x: isinstance(x, bool),
    "integer": lambda x: isinstance(x, int) and not isinstance(x, bool),
    "number": lambda x: isinstance(x, int | float) and not isinstance(x, bool),
}


def with_defaults(value: Any, schema: Schema) -> Any:
    """Return a value with the defaults of its schema where it says nothing."""
    if isinstance(value, dict):
        full = dict(value)
        for key, inner in schema.get("properties", {}).items():
            if key not in full and "default" in inner:
                full[key] = copy.deepcopy(inner["default"])
            if key in full:
                full[key] = with_defaults(full[key], inner)
        other = schema.get("additionalProperties")
        if isinstance(other, dict):
            known = schema.get("properties", {})
            full |= {k: with_defaults(v, other) for k, v in full.items() if k not in known}
        return full
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(entry, schema["items"]) for entry in value]
    return value


def pruned(value: Any, schema: Schema, path: str = "") -> tuple[Any, list[str]]:
    """Return a value without what its schema does not know, and the names of that.

    The top of an object keeps ``apiVersion``, ``kind`` and ``metadata``.
    """
    if schema.get("x-kubernetes-embedded-resource") or schema.get("x-kubernetes-int-or-string"):
        return value, []
    unknown: list[str] = []
    if isinstance(value, list):
        entries = [
            pruned(entry, schema.get("items", {}), f"{path}[{n}]") for n, entry in enumerate(value)
        ]
        return [x for x, _ in entries], [name for _, names in entries for name in names]
    if not isinstance(value, dict):
        return value, []
    keeps = schema.get("x-kubernetes-preserve-unknown-fields", False)
    known, other = schema.get("properties", {}), schema.get("additionalProperties")
    kept = {}
    for key, inner in value.items():
        where = f"{path}.{key}" if path else key
        if not path and key in _META:
            kept[key] = inner
        elif key in known or isinstance(other, dict):
            kept[key], names = pruned(inner, known.get(key, other), where)
            unknown += names
        elif keeps or other is True:
            kept[key] = inner
        else:
            unknown.append(where)
    return kept, unknown


def broken_rules(value: Any, schema: Schema, old: Any = None) -> list[Cause]:
    """Return what an object breaks: types, bounds, patterns, required fields and CEL rules.

    Args:
        value: what is to be written.
        schema: of the CustomResourceDefinition.
        old: what is there; None at creation, where rules with `oldSelf` do not count.
    """
    causes = _broken_types(value, schema, "")
    if "x-kubernetes-validations" not in json.dumps(schema):
        return causes
    if any(cause.reason in _BLOCKING for cause in causes):
        return [*causes, Cause("<nil>", "FieldValueInvalid", _UNCHECKED)]
    return causes + _broken_cel(value, schema, old, "")


def _broken_types(value: Any, schema: Schema, path: str) -> list[Cause]:
    if value is None and schema.get("nullable"):
        return []
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, int | str) else [_mistyped(path, "integer,string", value)]
    kind = schema.get("type")
    if kind and not _TYPES[kind](value):
        return [_mistyped(path, kind, value)]
    causes = _broken_bounds(value, schema, path)
    if isinstance(value, dict):
        for key in schema.get("required", []):
            if key not in value:
                causes.append(Cause(_join(path, key), "FieldValueRequired", "Required value"))
    for where, inner, rules, _ in _parts(value, schema, None, path):
        causes += _broken_types(inner, rules, where)
    return causes


def _parts(
    value: Any, schema: Schema, old: Any, path: str
) -> Iterator[tuple[str, Any, Schema, Any]]:
    """Yield what is in a value: where it stands, itself, its schema, and what it was."""
    if isinstance(value, dict):
        was = old if isinstance(old, dict) else {}
        for key, inner in sorted(value.items()):
            rules = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
            if isinstance(rules, dict) and not (not path and key in _META):
                yield _join(path, key), inner, rules, was.get(key)
    elif isinstance(value, list):
        rules = schema.get("items", {})
        for number, entry in enumerate(value):
            yield f"{path}[{number}]", entry, rules, _counterpart(entry, old, schema)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _counterpart(entry: Any, old: Any, schema: Schema) -> Any:
    """Return which entry of a list was this one before."""
    keys = schema.get("x-kubernetes-list-map-keys")
    if not keys or not isinstance(old, list) or not isinstance(entry, dict):
        return None
    return next((x for x in old if all(x.get(k) == entry.get(k) for k in keys)), None)


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return json.dumps("object" if isinstance(value, dict) else "array")
    return json.dumps(value)


def _mistyped(path: str, kind: str, value: Any) -> Cause:
    found = next((name for name, holds in _TYPES.items() if holds(value)), "null")
    message = f'Invalid value: "{found}": {path} in body must be of type {kind}: "{found}"'
    return Cause(path, "FieldValueTypeInvalid", message)


def _broken_bounds(value: Any, schema: Schema, path: str) -> list[Cause]:
    said: list[str] = []
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            said.append(f"should be greater than or equal to {schema['minimum']}")
        if value > schema.get("maximum", value):
            said.append(f"should be less than or equal to {schema['maximum']}")
    if isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            said.append(f"should be at least {schema['minLength']} chars long")
        if "maxLength" in schema and len(value) > schema["maxLength"]:
            return [
                Cause(
                    path,
                    "FieldValueTooLong",
                    f"Too long: may not be more than {schema['maxLength']} bytes",
                )
            ]
        if "pattern" in schema and not re.search(schema["pattern"], value):
            said.append(f"should match '{schema['pattern']}'")
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            said.append(f"should have at least {schema['minItems']} items")
        if "maxItems" in schema and len(value) > schema["maxItems"]:
            must = f"Too many: {len(value)}: must have at most {schema['maxItems']} items"
            return [Cause(path, "FieldValueTooMany", must)]
    causes = [
        Cause(path, "FieldValueInvalid", f"Invalid value: {_shown(value)}: {path} in body {text}")
        for text in said
    ]
    if "enum" in schema and value not in schema["enum"]:
        allowed = ", ".join(_shown(x) for x in schema["enum"])
        message = f"Unsupported value: {_shown(value)}: supported values: {allowed}"
        causes.append(Cause(path, "FieldValueNotSupported", message))
    return causes


def _broken_cel(value: Any, schema: Schema, old: Any, path: str) -> list[Cause]:
    causes = []
    for rule in schema.get("x-kubernetes-validations", []):
        names: Object = {"self": value}
        if re.search(r"\boldSelf\b", rule["rule"]):
            if old is None:
                continue
            names["oldSelf"] = old
        if cel.evaluate(rule["rule"], names) is not True:
            message = rule.get("message") or f"failed rule: {rule['rule']}"
            shown = "" if isinstance(value, dict | list) else f"{_shown(value)}: "
            where = f"{path}{rule.get('fieldPath', '')}".lstrip(".") or "<nil>"
            reason = rule.get("reason", "FieldValueInvalid")
            causes.append(Cause(where, reason, f"Invalid value: {shown}{message}"))
    for where, inner, rules, was in _parts(value, schema, old, path):
        causes += _broken_cel(inner, rules, was, where)
    return causes
