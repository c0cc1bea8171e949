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

_After = Annotated[int, Query(ge=0, le=2**62, description="Only events of larger ids.")]
_Since = Annotated[
    int | None, Query(ge=0, le=2**62, description="Only events of larger ids; 0: from the first.")
]
_Summary = Annotated[
    bool, Query(description="Only what people are told, each with a sentence, `text`.")
]
_Limit = Annotated[int, Query(ge=1, le=10_000, description="So many at most.")]
_Job = Annotated[str | None, Query(max_length=255, description="Only events of this job.")]
_Types = Annotated[
    list[Annotated[str, StringConstraints(max_length=50)]],
    Query(max_length=100, description="Only events of one of these types."),
]
_Last = Annotated[
    int | None, Query(ge=0, le=10_000, description="So many of the newest, in place of the oldest.")
]
_Seconds = Annotated[
    float | None,
    Query(ge=0, le=1e12, allow_inf_nan=False, description="Only the last so many seconds."),
]

router = APIRouter(
    prefix="/events", tags=["events"], dependencies=[NeedsRole], responses=refusals()
)


@router.get("", response_model=list[EventView], summary="The event log")
def events(
    store: StoreDep,
    after: _After = 0,
    limit: _Limit = 1000,
    job: _Job = None,
    type: _Types = [],  # noqa: A002, B006  # the parameter is called so; FastAPI's way to say none
    last: _Last = None,
    seconds: _Seconds = None,
) -> list[dict[str, Any]]:
    """Return events in the order they happened, oldest first."""
    if last is not None:
        return store.latest_events(last, job=job, types=type or None)
    if seconds is not None:
        after = max(after, last_event_before(store, seconds))
    return store.events(after, job=job, types=type or None, limit=limit)


@router.get(
    "/stream",
    response_class=Response,
    responses=text_reply("text/event-stream"),
    summary="Events as they happen",
)
async def follow(
    request: Request,
    services: ServicesDep,
    caller: CallerDep,
    after: _Since = None,
    job: _Job = None,
    summary: _Summary = False,
) -> EventStream:
    """Stream server-sent events with `id`; a client that sends `Last-Event-ID` misses none.

    Without that header and without `after`, the stream starts now. It ends when the token does.
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
