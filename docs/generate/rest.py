"""`reference/rest.md`, from the OpenAPI document of the server."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipollux_protocol.reference import literal, table, type_name
from pipollux_sched.server.app import create_app
from pipollux_sched.server.limits import Limits
from pipollux_sched.server.roles import ACCESS
from pipollux_sched.server.schemas import REFUSALS
from pipollux_sched.spec.tokens import Role

from . import job_file
from .attributes import attribute_docstrings
from .notes import Notes

JOB_SIDE = "jobs' own"
REFERENCE = re.compile(r"\[([\w-]+)\]\(#[\w-]+\)")


class _Absent:
    """Stands for the store and the commands: the document is made without a request."""

    def __getattr__(self, name: str) -> Any:
        return self


def page() -> str:
    """Return the page, as Markdown."""
    notes = Notes("rest")
    text = "\n".join(_lines(notes)) + "\n"
    notes.close()
    return text


def _lines(notes: Notes) -> Iterator[str]:
    absent: Any = _Absent()
    document = create_app(absent, absent, state_dir=absent, admin_token="").openapi()
    yield "# REST API"
    yield ""
    yield "<!-- Generated from the OpenAPI document by `make reference`. -->"
    yield from notes.lines("introduction")
    yield ""
    yield "## Errors"
    yield from notes.lines("errors")
    yield ""
    yield from table(
        ("status", "meaning"), [(str(status), text) for status, text in REFUSALS.items()]
    )
    yield from notes.lines("after errors")
    yield ""
    yield "## Limits"
    yield from notes.lines("limits")
    yield ""
    yield from table(("limit", "value", "meaning"), list(_limits()))
    for tag in document["tags"]:
        if tag["name"] != JOB_SIDE:
            yield ""
            yield f"## {tag['name'].capitalize()}"
            yield ""
            yield tag["description"]
            for method, path, operation in _operations(document):
                if operation["tags"] == [tag["name"]]:
                    yield from _operation(method, path, operation)
                    yield from notes.lines(f"{method} {path}")
    yield ""
    yield "## Requests of jobs"
    yield from notes.lines("requests of jobs")
    yield ""
    yield "## Objects"
    yield from notes.lines("objects")
    for name in _used(document):
        yield from _object(name, document["components"]["schemas"][name])
    yield from notes.lines("examples")


def _limits() -> Iterator[tuple[str, str, str]]:
    meanings = attribute_docstrings(Limits)
    for field in dataclasses.fields(Limits):
        yield f"`{field.name}`", f"{field.default:g}", meanings[field.name]


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    access = ACCESS[method, path]
    yield ""
    yield f"### {method} {path}"
    yield ""
    yield _prose(operation["description"])
    yield ""
    yield f"Access: {access.value}."
    if access.value not in {*Role, "open"}:
        yield f"Least role: {access.role.value}."
    for status, response in operation["responses"].items():
        if status.startswith("2"):
            content = response.get("content", {})
            for media, answer in content.items():
                kind = (
                    media if media != "application/json" else _linked(type_name(answer["schema"]))
                )
                yield f"Response {status}: {kind}."
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        yield f"Body: {_linked(type_name(schema))}."
    parameters = [one for one in operation.get("parameters", []) if one["in"] == "query"]
    if parameters:
        yield ""
        yield from table(
            ("query parameter", "type", "default", "meaning"),
            [
                (
                    f"`{one['name']}`",
                    _linked(type_name(one["schema"])),
                    "required" if one["required"] else _default(one["schema"]),
                    _prose(one.get("description", "")),
                )
                for one in parameters
            ],
        )


def _default(schema: Mapping[str, Any]) -> str:
    value = schema.get("default")
    return "none" if value in (None, []) else literal(value)


def _used(document: Mapping[str, Any]) -> list[str]:
    """Return the objects of this page, sorted: those of users' requests, and what they hold."""
    schemas = document["components"]["schemas"]
    found: set[str] = set()
    waiting = [
        name
        for _, _, operation in _operations(document)
        if operation["tags"] != [JOB_SIDE]
        for name in _references(operation)
    ]
    waiting.append("SchedHints")
    while waiting:
        name = waiting.pop()
        if name not in found and name not in job_file.MODELS:
            found.add(name)
            waiting += _references(schemas[name])
    return sorted(found)


def _references(entry: Any) -> Iterator[str]:
    if isinstance(entry, Mapping):
        if isinstance(entry.get("$ref"), str):
            yield entry["$ref"].rpartition("/")[2]
        entry = list(entry.values())
    if isinstance(entry, list):
        for part in entry:
            yield from _references(part)


def _object(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield f"### {name}"
    about = _prose(schema.get("description", "").split("Example:")[0])
    if about:
        yield ""
        yield about
    yield ""
    if "enum" in schema:
        yield f"One of {', '.join(f'`{value}`' for value in schema['enum'])}."
        return
    rows = [
        (f"`{key}`", _linked(type_name(entry)), _prose(entry.get("description", "")))
        for key, entry in schema["properties"].items()
    ]
    if any(meaning for _, _, meaning in rows):
        yield from table(("field", "type", "meaning"), rows)
    else:
        yield from table(("field", "type"), [row[:2] for row in rows])


def _linked(text: str) -> str:
    """Return a type whose links lead to the page that has the object."""

    def link(found: re.Match[str]) -> str:
        name = found[1]
        if name in job_file.MODELS:
            return f"[{name}](job-file.md#{job_file.anchor(name)})"
        return f"[{name}](#{name.lower()})"

    return REFERENCE.sub(link, text)


def _prose(text: str) -> str:
    return " ".join(text.split())
