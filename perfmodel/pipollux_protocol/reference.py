"""The reference page of the protocol, generated from its definitions.

python -m pipollux_protocol.reference > docs/reference/protocol.md

`table`, `type_name` and `literal` serve the other pages of the reference, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from . import files, messages
from .environment import VARIABLES
from .exit_statuses import STATUSES


class Request(NamedTuple):
    """A request of a job."""

    method: str
    path: str
    body: type[BaseModel] | None
    answer: type[BaseModel] | None
    meaning: str


REQUESTS = (
    Request(
        "POST",
        "/jobs/NAME/heartbeats",
        messages.Heartbeat,
        messages.HeartbeatAnswer,
        "Sent by each replica every `PIPOLLUX_HEARTBEAT_INTERVAL` seconds. A replica without "
        "heartbeats counts as lost.",
    ),
    Request(
        "POST",
        "/jobs/NAME/reports",
        messages.TrainingReport,
        messages.ReportAnswer,
        "Sent by replica 0 at the interval that the answer to the last report sets.",
    ),
    Request(
        "PUT",
        "/jobs/NAME/hints?attempt=NUMBER",
        None,
        None,
        "Sent by replica 0 after each fit of the performance model. The body contains the "
        "[hints](rest.md#schedhints).",
    ),
    Request(
        "GET",
        "/jobs/NAME/inheritance?attempt=NUMBER",
        None,
        messages.InheritanceAnswer,
        "Sent once by replica 0 of a job without measurements.",
    ),
    Request(
        "POST",
        "/jobs/NAME/stops",
        messages.Stop,
        None,
        "Sent by replica 0 once all replicas have stopped and the checkpoint is written.",
    ),
    Request(
        "POST",
        "/jobs/NAME/replicas",
        messages.ReplicaRegistration,
        None,
        "Sent by the agent of each replica if the scheduler does not assign addresses.",
    ),
    Request(
        "GET",
        "/jobs/NAME/replicas?attempt=NUMBER&wait=SECONDS",
        None,
        messages.ReplicaAddresses,
        "Sent by these agents until all replicas have registered.",
    ),
)
FILES = (
    (files.STOP_MARKER, files.StopMarker, "by replica 0, in the checkpoint directory"),
    (
        files.UNSENT_REPORT,
        messages.TrainingReport,
        "by replica 0, in the checkpoint directory, if its last report could not be delivered",
    ),
    (
        "`PIPOLLUX_RESULT_FILE`",
        files.AgentResult,
        "by the agent of each replica, when the script ends",
    ),
)
SOURCE = "perfmodel/pipollux_protocol"


def page() -> str:
    """Return the page, as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Protocol between a job and the scheduler"
    yield ""
    yield f"<!-- Generated from {SOURCE} by `python -m pipollux_protocol.reference`. -->"
    yield ""
    yield "The scheduler starts one agent per replica, and the agent starts the training script."
    yield "Scheduler and job communicate through environment variables, HTTP requests, files and"
    yield "exit statuses, all defined in the package `pipollux_protocol`."
    yield ""
    yield "## Environment variables"
    yield ""
    yield from table(
        ("variable", "set by", "meaning", "default"),
        [(f"`{x.name}`", x.set_by, x.meaning, x.default) for x in VARIABLES],
    )
    yield ""
    yield "## Exit statuses"
    yield ""
    yield from table(
        ("status", "meaning", "consequence"),
        [(str(x.status), x.meaning, x.consequence) for x in STATUSES],
    )
    yield ""
    yield "Any other status is a failure of the script."
    yield ""
    yield "## Requests"
    yield ""
    yield "Jobs send JSON over HTTP, with the header `Authorization: Bearer TOKEN`, where TOKEN is"
    yield "the job's token. Unknown keys are errors in requests and ignored in answers. Requests of"
    yield "a replaced attempt receive status 409; its replicas exit with status 75."
    for request in REQUESTS:
        yield ""
        yield f"### {request.method} {request.path}"
        yield ""
        yield request.meaning
        for title, model in (("Body", request.body), ("Answer", request.answer)):
            if model is not None:
                yield ""
                yield f"{title}: {_link(model)}."
    yield ""
    yield "## Files"
    yield ""
    yield from table(
        ("file", "content", "written"),
        [(name if "`" in name else f"`{name}`", _link(x), by) for name, x, by in FILES],
    )
    yield ""
    yield "## Objects"
    for model in _models():
        yield ""
        yield f"### {model.__name__}"
        yield ""
        yield (model.__doc__ or "").split(": ``")[0].strip().splitlines()[0].rstrip(".") + "."
        yield ""
        yield from table(("key", "type", "default", "meaning"), _rows(model))


def _models() -> list[type[BaseModel]]:
    """Return all models, each followed by the models of its fields."""
    found: list[type[BaseModel]] = []
    waiting = [x for request in REQUESTS for x in (request.body, request.answer) if x is not None]
    waiting += [model for _, model, _ in FILES]
    while waiting:
        model = waiting.pop(0)
        if model not in found:
            found.append(model)
            waiting[:0] = [
                x for field in model.model_fields.values() for x in _held(field.annotation)
            ]
    return found


def _held(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _held(part)


def _rows(model: type[BaseModel]) -> list[tuple[str, str, str, str]]:
    schema = model.model_json_schema(by_alias=True)
    required = schema.get("required", [])
    return [
        (
            f"`{key}`",
            type_name(entry),
            "required" if key in required else literal(entry.get("default")),
            "; ".join(filter(None, (field.title, field.description))),
        )
        for (key, entry), field in zip(
            schema["properties"].items(), model.model_fields.values(), strict=True
        )
    ]


def type_name(entry: Mapping[str, Any]) -> str:
    """Return the type that an entry of a JSON schema describes, with links to objects."""
    if "$ref" in entry:
        name = entry["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in entry:
        return " or ".join(map(type_name, entry["anyOf"]))
    if "enum" in entry:
        return " or ".join(map(literal, entry["enum"]))
    if entry.get("type") == "array":
        items = entry.get("items") or {}
        return f"list of {type_name(items)}" if items else "list"
    return str(entry.get("type", "any"))


def literal(value: Any) -> str:
    """Return a value as JSON, in Markdown."""
    return f"`{json.dumps(value)}`"


def _link(model: type[BaseModel]) -> str:
    return f"[{model.__name__}](#{model.__name__.lower()})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |"


if __name__ == "__main__":
    sys.stdout.write(page())
