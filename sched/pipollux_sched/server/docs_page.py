"""`/docs`: the OpenAPI document as one HTML page that needs no network and no script."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

TAGS = {
    "jobs' own": "What jobs ask about themselves, with their own token.",
    "jobs": "Submitting, watching and ending jobs.",
    "nodes": "The cluster, and taking nodes out of it.",
    "events": "What has happened, and what happens.",
    "service": "The scheduler itself.",
}
"""Sections, in this order, with what each is about."""
WHO = {"jobToken": "job or admin", "adminToken": "admin"}


class FieldRow(NamedTuple):
    """One line of a table of fields or parameters."""

    name: str
    kind: Markup
    needed: str
    words: str


class Operation(NamedTuple):
    """One method of one path."""

    method: str
    path: str
    anchor: str
    who: str
    summary: str
    words: str
    parameters: list[FieldRow]
    body: Markup | None
    answer: Markup
    refusals: list[tuple[str, str]]


class Model(NamedTuple):
    """One object that is sent or answered."""

    name: str
    words: str
    fields: list[FieldRow]


def render_docs(document: dict[str, Any]) -> str:
    """Return the page for an OpenAPI document."""
    found = [
        (operation["tags"][0], _operation(method.upper(), path, operation))
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    sections = [
        (tag, words, [operation for its, operation in found if its == tag])
        for tag, words in TAGS.items()
    ]
    models = [_model(name, schema) for name, schema in document["components"]["schemas"].items()]
    template = _environment().get_template("docs.html.j2")
    return template.render(
        version=document["info"]["version"],
        words=_words(document["info"]["description"]),
        sections=sections,
        models=models,
    )


@lru_cache(maxsize=1)
def _environment() -> Environment:
    folders = {"style.css": "pipollux_sched.report", "docs.html.j2": __package__}

    def load(name: str) -> str:
        return resources.files(folders[name]).joinpath(name).read_text(encoding="utf-8")

    return Environment(
        loader=FunctionLoader(load),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> Operation:
    schemes = [name for entry in operation.get("security", []) for name in entry]
    body = operation.get("requestBody")
    responses = dict(operation["responses"])
    status = next(iter(responses))
    return Operation(
        method=method,
        path=path,
        anchor=f"{method} {path}".lower().translate(str.maketrans(" /{}", "----")),
        who=WHO[schemes[0]] if schemes else "none",
        summary=operation["summary"],
        words=_words(operation.get("description", "")),
        # Those in the path speak for themselves.
        parameters=[
            _parameter(entry) for entry in operation.get("parameters", []) if entry["in"] == "query"
        ],
        body=_content(body) if body else None,
        answer=Markup("<code>{}</code> {}").format(status, _content(responses.pop(status))),
        refusals=[(code, entry["description"]) for code, entry in responses.items()],
    )


def _parameter(entry: dict[str, Any]) -> FieldRow:
    schema = entry["schema"]
    default = schema.get("default")
    needed = "needed" if entry["required"] else f"default {default}" if default is not None else ""
    return FieldRow("?" + entry["name"], _kind(schema), needed, entry.get("description", ""))


def _model(name: str, schema: dict[str, Any]) -> Model:
    # What is answered is always whole.
    needed = [] if name.endswith("Reply") else schema.get("required", [])
    fields = [
        FieldRow(field, _kind(inner), _need(field, inner, needed), inner.get("description", ""))
        for field, inner in schema.get("properties", {}).items()
    ]
    words = schema.get("description", "").partition("\n\n")[0]
    return Model(name, _words(words or _alternatives(schema)), fields)


def _alternatives(schema: dict[str, Any]) -> str:
    return "One of " + ", ".join(schema["enum"]) + "." if "enum" in schema else ""


def _need(field: str, schema: dict[str, Any], needed: list[str]) -> str:
    if field in needed:
        return "needed"
    default = schema.get("default")
    return "" if default in (None, [], {}, "") else f"default {str(default).lower()}"


def _content(holder: dict[str, Any]) -> Markup:
    for kind, content in holder.get("content", {}).items():
        if kind == "application/json":
            return _kind(content["schema"])
        return Markup("text of type <code>{}</code>").format(kind)
    return Markup("nothing")


def _kind(schema: dict[str, Any]) -> Markup:
    """Say in words what a schema allows."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return Markup('<a href="#{0}">{0}</a>').format(name)
    if "const" in schema:
        return Markup("<code>{}</code>").format(schema["const"])
    if "enum" in schema:
        return Markup(" or ").join(Markup("<code>{}</code>").format(e) for e in schema["enum"])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return Markup(" or ").join(_kind(inner) for inner in schema[several])
    match schema.get("type"):
        case "array" if "prefixItems" in schema:
            return Markup("[{}]").format(Markup(", ").join(map(_kind, schema["prefixItems"])))
        case "array":
            return Markup("list of {}").format(_kind(schema.get("items", {})))
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            return Markup("object of {}").format(_kind(schema["additionalProperties"]))
        case "integer" | "number" | "string" | "boolean" | "null" | "object" as kind:
            words = {"integer": "whole number", "string": "text", "boolean": "true or false"}
            return Markup("{}").format(words.get(kind, kind))
    return Markup("anything")


def _words(text: str) -> Markup:
    """Escape text; what stands between backquotes is code, an empty line begins a paragraph."""
    parts = str(escape(text)).split("`")
    marked = "".join(
        f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts)
    )
    return Markup(marked.replace("\n\n", "<br>"))  # noqa: S704  # escaped above
