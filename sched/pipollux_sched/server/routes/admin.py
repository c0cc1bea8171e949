"""What users ask, with the admin's token: jobs, nodes, events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.concurrency import run_in_threadpool

from pipollux_sched.backend.local.replica_log import last_lines
from pipollux_sched.controller.commands import Control
from pipollux_sched.server.auth import Gate
from pipollux_sched.server.change_watch import News
from pipollux_sched.server.event_stream import EventStream, Tail, stream
from pipollux_sched.server.job_page import deleted_object, describe_job, explain_job
from pipollux_sched.server.limits import Limits, Places
from pipollux_sched.server.request_bodies import JsonObject, reader
from pipollux_sched.spec.job import parse_job, parse_jobs
from pipollux_sched.store import NodeCondition, StateDir, Store

MOST_POINTS = 500
"""Points of a job's curves: more than a picture of them has pixels for."""

_Points = Annotated[
    int, Query(ge=0, le=MOST_POINTS, description="Points of each curve at most; 0: no curves.")
]
_After = Annotated[int, Query(ge=0, le=2**62, description="Only events of larger ids.")]
_Since = Annotated[
    int | None, Query(ge=0, le=2**62, description="Only events of larger ids; 0: from the first.")
]
_Told = Annotated[
    bool, Query(description="Only what people are told, each with a sentence, `text`.")
]
_FromScratch = Annotated[
    bool, Query(description="Begin anew, and do not go on from its last checkpoint.")
]
_Job = Annotated[str | None, Query(max_length=255, description="Only events of this job.")]


class NodeChange(BaseModel):
    """What becomes of a node."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    condition: Annotated[
        Literal["ready", "draining", "dead"], Field(description="'ready', 'draining' or 'dead'")
    ]
    reason: Annotated[
        str,
        StringConstraints(max_length=500, strip_whitespace=True, pattern=r"^[^\x00-\x1f\x7f]*$"),
        Field(description="a text of one line and at most 500 characters"),
    ] = ""


_Change = Annotated[NodeChange, Depends(reader(NodeChange, "node"))]


def admin_side(
    store: Store, control: Control, state_dir: StateDir, gate: Gate, news: News, limits: Limits
) -> APIRouter:
    """Make the paths that users ask."""
    router = APIRouter(dependencies=[Depends(gate.admit_admin)])
    _add_jobs(router, store, control, state_dir)
    _add_nodes(router, store, control)
    _add_events(router, store, news, limits)
    return router


def _add_jobs(router: APIRouter, store: Store, control: Control, state_dir: StateDir) -> None:
    @router.post("/jobs", status_code=201, tags=["jobs"], summary="Submit a job")
    def submit(body: JsonObject) -> dict[str, Any]:
        """What was answered with 201 is on the disk, and starts as soon as something is free."""
        return control.submit(parse_job(body)).to_json_object()

    @router.post("/jobs/batch", status_code=201, tags=["jobs"], summary="Submit many jobs at once")
    def submit_all(body: JsonObject) -> JSONResponse:
        """All of them or none: where one is refused, the sentence names it, and nothing changes."""
        taken = control.submit_all(parse_jobs(body))
        return JSONResponse([job.to_json_object() for job in taken], 201)

    @router.get("/jobs", tags=["jobs"], summary="All jobs")
    def jobs() -> list[dict[str, Any]]:
        """In the order of their first submission."""
        return [job.to_json_object() for job in store.jobs()]

    @router.get("/jobs/{name}", tags=["jobs"], summary="One job, with its curves")
    def job(name: str, points: _Points = MOST_POINTS) -> dict[str, Any]:
        """With its launches, latest hints, replicas, progress and gradient noise."""
        return describe_job(store, control.heartbeats, store.job(name), points)

    @router.delete("/jobs/{name}", tags=["jobs"], summary="Cancel a job")
    def cancel(name: str) -> dict[str, Any]:
        """Its processes end; 409 where the job has ended already."""
        return control.cancel(name).to_json_object()

    @router.post("/jobs/{name}/suspend", tags=["jobs"], summary="Suspend a job")
    def suspend(name: str) -> dict[str, Any]:
        """It saves, ends its processes, and holds nothing until resumed; 409 where it has ended."""
        return control.suspend(name).to_json_object()

    @router.post("/jobs/{name}/resume", tags=["jobs"], summary="Resume a suspended job")
    def resume(name: str) -> dict[str, Any]:
        """It goes on from its checkpoint as soon as something is free; 409 where it has ended."""
        return control.resume(name).to_json_object()

    @router.post("/jobs/{name}/rerun", tags=["jobs"], summary="Run a job again that has ended")
    def rerun(name: str, from_scratch: _FromScratch = False) -> dict[str, Any]:
        """As it was submitted; 409 where it has not ended, or is complete and not to begin anew."""
        return control.rerun(name, from_scratch=from_scratch).to_json_object()

    @router.post("/jobs/{name}/delete", tags=["jobs"], summary="Delete a job that has ended")
    def delete(name: str) -> dict[str, Any]:
        """With its logs, events and checkpoints, but for a `checkpoint_dir` of its own; 409 where
        it has not ended.
        """
        return deleted_object(control.delete(name))

    @router.get("/jobs/{name}/explanation", tags=["jobs"], summary="Why a job has what it has")
    def explanation(name: str) -> dict[str, Any]:
        """What `pipollux explain` tells: the last decision, alternatives, limits."""
        return explain_job(store, store.job(name))

    @router.get("/jobs/{name}/logs", tags=["jobs"], summary="The last lines of a job's replicas")
    def logs(
        name: str,
        tail: Annotated[int, Query(ge=1, le=10_000, description="Lines of each.")] = 100,
        generation: Annotated[
            int | None, Query(ge=1, le=2**31, description="Only of this one.")
        ] = None,
    ) -> list[dict[str, Any]]:
        """Of every replica of every generation whose log is kept."""
        store.job(name)
        return [
            {"generation": number, "replica": replica, "lines": last_lines(path, tail)}
            for number, replica, path in state_dir.logs(name)
            if generation in (None, number)
        ]


def _add_nodes(router: APIRouter, store: Store, control: Control) -> None:
    def described(only: str | None = None) -> Iterator[dict[str, Any]]:
        holding = {job.name: job.state.launched for job in store.jobs()}
        for name, node in control.cluster()["nodes"].items():
            if only in (None, name):
                there = {job: nodes.count(name) for job, nodes in holding.items() if name in nodes}
                yield {"name": name, **node, "replicas": there}

    @router.get("/nodes", tags=["nodes"], summary="All nodes")
    def nodes() -> list[dict[str, Any]]:
        """Their slots, their condition, and how many replicas of which jobs are there."""
        return list(described())

    @router.put("/nodes/{name}", tags=["nodes"], summary="Drain a node, or say that it is dead")
    def set_node(name: str, change: _Change) -> dict[str, Any]:
        """`draining`: jobs leave; `dead`: they start elsewhere; `ready`: it is there again."""
        control.set_node(name, NodeCondition(change.condition), change.reason)
        return next(described(name))

    @router.post("/decisions", status_code=202, tags=["nodes"], summary="Decide now")
    def decide() -> dict[str, str]:
        """The allocator weighs all jobs at once, and not only at the next interval."""
        control.decide()
        return {"status": "deciding"}

    @router.get("/cluster", tags=["nodes"], summary="The cluster as the policy has it")
    def cluster() -> Mapping[str, Any]:
        """Nodes with their free slots, and who decides on them."""
        return control.cluster()


def _add_events(router: APIRouter, store: Store, news: News, limits: Limits) -> None:
    places = Places(limits.listeners, limits.listeners, "listen to events")
    tail = Tail(store)

    @router.get("/events", tags=["events"], summary="The event log")
    def events(
        after: _After = 0,
        limit: Annotated[int, Query(ge=1, le=10_000, description="So many at most.")] = 1000,
        job: _Job = None,
    ) -> list[dict[str, Any]]:
        """In the order they happened, the oldest first."""
        return store.events(after, job=job, limit=limit)

    @router.get("/events/stream", tags=["events"], summary="Events as they happen")
    async def follow(
        request: Request, after: _Since = None, job: _Job = None, told: _Told = False
    ) -> EventStream:
        """Server-sent events, each with its `id`; who comes back with `Last-Event-ID` misses none.

        Without that header and without `after`, from now on.
        """
        since = _last_event_id(request)
        since = after if since is None else since
        if since is None:
            since = await run_in_threadpool(store.last_event)
        text = stream(news, tail, since, job, limits.keep_alive, told=told)
        return EventStream(text, places)


def _last_event_id(request: Request) -> int | None:
    text = request.headers.get("Last-Event-ID")
    if text is None or not text.strip():
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise HTTPException(
            422, f"the header Last-Event-ID is {text[:60]!r}; give the id of the last event you had"
        )
    return int(text)
