"""What the web page asks for: the cluster at a glance, generations, how full nodes were."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import StringConstraints

from pipollux_sched.server.dependencies import ControlDep, NeedsAdmin, StoreDep
from pipollux_sched.server.schemas import GenerationLine, OverviewReply, UsageReply, refusals
from pipollux_sched.server.views import describe_all, describe_generations, describe_usage
from pipollux_sched.store import JobOrder, JobQuery, ListedPhase

MOST_JOBS = 500
"""Jobs of a page."""
MOST_PARTS = 500
"""Parts of a span: more than a picture of it has pixels for."""

_Moment = Annotated[
    float, Query(ge=0, le=1e12, allow_inf_nan=False, description="Seconds since the epoch.")
]
_Last = Annotated[int, Query(ge=0, le=500, description="So many of the last events.")]
_Phases = Annotated[list[ListedPhase], Query(description="Only jobs in one of these phases.")]
_Name = Annotated[
    str, Query(max_length=255, description="Only jobs with this in their name, in any case.")
]
_Order = Annotated[JobOrder, Query(description="What to sort the jobs by.")]
_Descending = Annotated[bool, Query(description="The greatest first; what is not known is last.")]
_Offset = Annotated[int, Query(ge=0, le=2**31, description="So many jobs are passed over.")]
_Limit = Annotated[int, Query(ge=0, le=MOST_JOBS, description="So many jobs at most.")]
_Nodes = Annotated[
    list[Annotated[str, StringConstraints(max_length=255)]] | None,
    Query(max_length=1000, description="Only on these nodes; none: on any."),
]
_Parts = Annotated[
    int, Query(ge=1, le=MOST_PARTS, description="Into so many equal parts the time is cut.")
]


router = APIRouter(tags=["nodes"], dependencies=[NeedsAdmin], responses=refusals())


@router.get("/overview", response_model=OverviewReply, summary="Everything at a glance")
def overview(
    store: StoreDep,
    control: ControlDep,
    phase: _Phases = [],  # noqa: B006  # FastAPI's way to say none
    name: _Name = "",
    order: _Order = JobOrder.USUAL,
    descending: _Descending = False,
    offset: _Offset = 0,
    limit: _Limit = 50,
    events: _Last = 0,
) -> dict[str, Any]:
    """Nodes, how many jobs are in each phase, a page of the list of jobs, the last events."""
    query = JobQuery(tuple(phase), name.strip(), order, descending, offset, limit)
    return describe_all(store, control, query, events)


@router.get("/generations", response_model=list[GenerationLine], summary="Who held what")
def generations(store: StoreDep, since: _Moment = 0.0, node: _Nodes = None) -> list[dict[str, Any]]:
    """The generations that held something after a moment, 5000 at most, the oldest first."""
    return describe_generations(store, since, node)


@router.get("/usage", response_model=UsageReply, summary="How full the nodes were")
def usage(store: StoreDep, since: _Moment = 0.0, parts: _Parts = 100) -> dict[str, Any]:
    """From a moment until now; the mean of each part of that time."""
    return describe_usage(store, since, parts)
