"""The OpenAPI document: what FastAPI finds out by itself, and what it cannot know.

Bodies are read by hand, so that a refusal is one sentence; which model each is held to, and what is
answered, stands in tables here.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema

from pipollux_perfmodel import SchedHints
from pipollux_sched.controller.training_report import TrainingReport
from pipollux_sched.server.routes.job_side import HeartbeatBody, Registration
from pipollux_sched.server.routes.nodes import NodeChange
from pipollux_sched.spec.job import JobBatch, JobSpec

from . import schemas

BODIES: dict[tuple[str, str], Any] = {
    ("put", "/jobs/{name}/hints"): SchedHints,
    ("post", "/jobs/{name}/reports"): TrainingReport,
    ("post", "/jobs/{name}/heartbeats"): HeartbeatBody,
    ("post", "/jobs/{name}/replicas"): Registration,
    ("post", "/jobs"): JobSpec,
    ("post", "/jobs/batch"): JobBatch,
    ("put", "/nodes/{name}"): NodeChange,
}
"""What is sent."""
REPLIES: dict[tuple[str, str], Any] = {
    ("get", "/jobs/{name}/replicas"): schemas.DiscoveryReply,
    ("post", "/jobs"): schemas.JobReply,
    ("post", "/jobs/batch"): list[schemas.JobReply],
    ("get", "/jobs"): list[schemas.JobReply],
    ("get", "/jobs/{name}"): schemas.JobPageReply,
    ("delete", "/jobs/{name}"): schemas.JobReply,
    ("post", "/jobs/{name}/suspend"): schemas.JobReply,
    ("post", "/jobs/{name}/resume"): schemas.JobReply,
    ("post", "/jobs/{name}/rerun"): schemas.JobReply,
    ("post", "/jobs/{name}/delete"): schemas.DeletedReply,
    ("get", "/jobs/{name}/explanation"): schemas.ExplanationReply,
    ("get", "/jobs/{name}/logs"): list[schemas.LogReply],
    ("get", "/nodes"): list[schemas.NodeReply],
    ("post", "/decisions"): schemas.Deciding,
    ("put", "/nodes/{name}"): schemas.NodeReply,
    ("get", "/cluster"): schemas.ClusterReply,
    ("get", "/overview"): schemas.OverviewReply,
    ("get", "/generations"): list[schemas.GenerationLine],
    ("get", "/usage"): schemas.UsageReply,
    ("get", "/events"): list[schemas.EventReply],
    ("get", "/healthz"): schemas.Health,
}
"""What is answered, where it is JSON."""
TEXTS = {
    ("get", "/events/stream"): "text/event-stream",
    ("get", "/metrics"): "text/plain",
}
"""What is answered, where it is text."""
REFUSALS = {
    "401": "The token is missing or wrong.",
    "404": "There is nothing of this name.",
    "409": "It does not fit the job's present state: another generation, or a name that is taken.",
    "413": "The body is larger than 1 MiB.",
    "422": "The request makes no sense; the sentence names the field and what is allowed.",
    "429": "Too many requests; Retry-After says when to ask again.",
    "503": "The scheduler is being stopped, or as many wait already as can.",
}
"""When requests are refused."""
DESCRIPTION = (
    "Every request but those for `/healthz`, `/docs`, `/openapi.json` and the web page at `/` "
    "bears a token, as in "
    "`Authorization: Bearer TOKEN`: a job's own, or the admin's, which opens everything. Bodies "
    "are JSON objects of at most 1 MiB. Every refusal is an object with one sentence, `detail`."
)


def document(app: FastAPI, version: str) -> dict[str, Any]:
    """Return the OpenAPI document of an application; made once."""
    if app.openapi_schema is None:
        made = get_openapi(
            title="Pipollux", version=version, description=DESCRIPTION, routes=app.routes
        )
        found = made["components"]["schemas"]
        components = {
            name: schema for name, schema in found.items() if "enum" in schema
        }  # of queries
        for path, operations in made["paths"].items():
            for method, operation in operations.items():
                _complete(operation, (method, path), components)
        components["Refusal"] = _schema(schemas.Refusal, components, inline=True)
        made["components"]["schemas"] = dict(sorted(components.items()))
        app.openapi_schema = made
    return app.openapi_schema


def _complete(operation: dict[str, Any], key: tuple[str, str], schemas: dict[str, Any]) -> None:
    if key in BODIES:
        content = {"application/json": {"schema": _schema(BODIES[key], schemas)}}
        operation["requestBody"] = {"required": True, "content": content}
    operation.pop("operationId", None)
    fine = next(iter(operation["responses"]))
    answer: dict[str, Any] = {"description": "Done; there is nothing more to say."}
    if key in REPLIES:
        schema = _schema(REPLIES[key], schemas)
        answer = {"description": "Done.", "content": {"application/json": {"schema": schema}}}
    elif key in TEXTS:
        text = {"schema": {"type": "string"}}
        answer = {"description": "Done.", "content": {TEXTS[key]: text}}
    operation["responses"] = {fine: answer}
    if "security" not in operation:
        return
    refusal = {"application/json": {"schema": {"$ref": "#/components/schemas/Refusal"}}}
    for status, when in REFUSALS.items():
        named, sent = "{name}" in key[1], key in BODIES
        if (status == "404" and not named) or (status == "413" and not sent):
            continue
        if status == "409" and not (named or sent):
            continue
        operation["responses"][status] = {"description": when, "content": refusal}


def _schema(model: Any, schemas: dict[str, Any], *, inline: bool = False) -> dict[str, Any]:
    """Return a reference to a model's schema, which is put among the others."""
    try:
        made = TypeAdapter(model).json_schema(ref_template="#/components/schemas/{model}")
    except PydanticInvalidForJsonSchema:
        made = {"type": "object", "title": model.__name__, "description": model.__doc__}
    schemas.update(made.pop("$defs", {}))
    if inline or made.get("type") != "object":
        return made
    schemas[made["title"]] = made
    return {"$ref": f"#/components/schemas/{made['title']}"}
