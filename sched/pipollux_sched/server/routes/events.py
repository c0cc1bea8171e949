"""Routes of the event log and the live event stream."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request, Response
from pydantic import StringConstraints
from starlette.concurrency import run_in_threadpool

from pipollux_sched.server.dependencies import CallerDep, NeedsRole, ServicesDep, StoreDep
from pipollux_sched.server.event_stream import EventStream, stream
from pipollux_sched.server.schemas import refusals, text_reply
from pipollux_sched.views.events import last_event_before
from pipollux_sched.views.models import EventView

_After = Annotated[int, Query(ge=0, le=2**62, description="Only events with larger ids.")]
_Since = Annotated[
    int | None, Query(ge=0, le=2**62, description="Only events with larger ids; 0: all events.")
]
_Summary = Annotated[bool, Query(description="Only events with a sentence for users, in `text`.")]
_Limit = Annotated[int, Query(ge=1, le=10_000, description="Largest number of events.")]
_Job = Annotated[str | None, Query(max_length=255, description="Only events of this job.")]
_Types = Annotated[
    list[Annotated[str, StringConstraints(max_length=50)]],
    Query(max_length=100, description="Only events of one of these types."),
]
_Last = Annotated[
    int | None, Query(ge=0, le=10_000, description="Return this many newest events instead.")
]
_Seconds = Annotated[
    float | None, Query(ge=0, le=1e12, allow_inf_nan=False, description="Only the last seconds.")
]

router = APIRouter(
    prefix="/events", tags=["events"], dependencies=[NeedsRole], responses=refusals()
)


@router.get("", response_model=list[EventView], summary="List events")
def events(
    store: StoreDep,
    after: _After = 0,
    limit: _Limit = 1000,
    job: _Job = None,
    type: _Types = [],  # noqa: A002, B006  # the name of the parameter; FastAPI copies the default
    last: _Last = None,
    seconds: _Seconds = None,
) -> list[dict[str, Any]]:
    """Return events, oldest first."""
    if last is not None:
        return store.latest_events(last, job=job, types=type or None)
    if seconds is not None:
        after = max(after, last_event_before(store, seconds))
    return store.events(after, job=job, types=type or None, limit=limit)


@router.get(
    "/stream",
    response_class=Response,
    responses=text_reply("text/event-stream"),
    summary="Stream events",
)
async def follow(
    request: Request,
    services: ServicesDep,
    caller: CallerDep,
    after: _Since = None,
    job: _Job = None,
    summary: _Summary = False,
) -> EventStream:
    """Stream events as server-sent events; a client that sends `Last-Event-ID` misses none.

    Without that header and `after`, the stream starts with the next event. It ends when the token
    is revoked.
    """
    since = _last_event_id(request)
    since = after if since is None else since
    if since is None:
        since = await run_in_threadpool(services.store.last_event)
    keep_alive = services.limits.keep_alive
    text = stream(
        services.changes,
        services.tail,
        since,
        job,
        keep_alive,
        summary=summary,
        allowed=lambda: services.auth.knows(request.state.token),
    )
    return EventStream(text, caller.place(services.listening))


def _last_event_id(request: Request) -> int | None:
    text = request.headers.get("Last-Event-ID")
    if text is None or not text.strip():
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise HTTPException(
            422, f"the header Last-Event-ID is {text[:60]!r}; give the id of the last event you had"
        )
    return int(text)
