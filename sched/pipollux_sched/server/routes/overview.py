"""Routes of the whole cluster: overview, attempts, usage, plan, forecasts, report."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Response
from pydantic import StringConstraints

from pipollux_policies import parse_policy
from pipollux_sched.planning.dry_run import live_plan
from pipollux_sched.report.run_events import kept_report
from pipollux_sched.server.dependencies import CallerDep, NeedsRole, ServicesDep, StoreDep
from pipollux_sched.server.schemas import refusals, text_reply
from pipollux_sched.store import JobOrder, JobQuery, ListedPhase
from pipollux_sched.views.cluster import MOST_JOBS, cluster_view, list_attempts, node_usage
from pipollux_sched.views.forecasts import list_forecasts
from pipollux_sched.views.models import (
    AttemptLine,
    CallerView,
    ClusterView,
    ForecastsView,
    PlanView,
    UsageView,
)

MOST_PARTS = 500
"""Largest number of intervals, more than the pixels of a chart."""

_Moment = Annotated[
    float, Query(ge=0, le=1e12, allow_inf_nan=False, description="Seconds since the epoch.")
]
_Last = Annotated[int, Query(ge=0, le=500, description="Number of last events.")]
_Phases = Annotated[list[ListedPhase], Query(description="Only jobs in one of these phases.")]
_Name = Annotated[
    str, Query(max_length=255, description="Only jobs whose name contains this, ignoring case.")
]
_Order = Annotated[JobOrder, Query(description="Sort key of the jobs.")]
_Descending = Annotated[bool, Query(description="Descending order; unknown values are last.")]
_Offset = Annotated[int, Query(ge=0, le=2**31, description="Number of jobs to skip.")]
_Limit = Annotated[int, Query(ge=0, le=MOST_JOBS, description="Largest number of jobs.")]
_Trials = Annotated[bool, Query(description="Whether trials of sweeps are listed and counted.")]
_Nodes = Annotated[
    list[Annotated[str, StringConstraints(max_length=255)]] | None,
    Query(max_length=1000, description="Only attempts on these nodes; empty: on any node."),
]
_Parts = Annotated[int, Query(ge=1, le=MOST_PARTS, description="Number of equal intervals.")]
_Policy = Annotated[
    str | None,
    Query(
        max_length=500,
        description="Allocation policy, as in exact:tail=1; none: the scheduler's own.",
    ),
]
_Seed = Annotated[int, Query(ge=0, le=2**32 - 1, description="Random seed of the policy.")]
_Jobs = Annotated[
    list[Annotated[str, StringConstraints(max_length=255)]],
    Query(max_length=1000, description="Only these jobs; empty: all."),
]
_Seconds = Annotated[
    float | None, Query(ge=0, le=1e12, allow_inf_nan=False, description="Only the last seconds.")
]

router = APIRouter(tags=["nodes"], dependencies=[NeedsRole], responses=refusals())


@router.get("/overview", response_model=ClusterView, summary="Get an overview of the cluster")
def overview(
    store: StoreDep,
    caller: CallerDep,
    phase: _Phases = [],  # noqa: B006  # FastAPI copies the default
    name: _Name = "",
    order: _Order = JobOrder.USUAL,
    descending: _Descending = False,
    offset: _Offset = 0,
    limit: _Limit = 50,
    events: _Last = 0,
    trials: _Trials = True,
) -> ClusterView:
    """Return the nodes, the number of jobs by phase, a page of jobs, the last events."""
    query = JobQuery(tuple(phase), name.strip(), order, descending, offset, limit, trials)
    asked_by = CallerView(name=caller.name, role=caller.role, team=caller.team)
    return cluster_view(store, query, events).model_copy(update={"caller": asked_by})


@router.get("/attempts", response_model=list[AttemptLine], summary="List attempts and their slots")
def attempts(store: StoreDep, since: _Moment = 0.0, node: _Nodes = None) -> list[AttemptLine]:
    """Return the attempts that held slots after a moment, at most 5000, oldest first."""
    return list_attempts(store, since, node)


@router.get("/usage", response_model=UsageView, summary="Get the slot usage of nodes")
def usage(store: StoreDep, since: _Moment = 0.0, parts: _Parts = 100) -> UsageView:
    """Return the mean number of used slots in each interval from a time until now."""
    return node_usage(store, since, parts)


@router.get("/plan", response_model=PlanView, summary="Get the plan")
def plan(
    services: ServicesDep, caller: CallerDep, policy: _Policy = None, seed: _Seed = 0
) -> PlanView:
    """Return the allocation that each job would get now, with the reason; change nothing."""
    if policy is not None:
        try:
            parse_policy(policy)
        except ValueError as error:
            raise HTTPException(422, str(error)) from None
    with caller.place(services.computing):
        return live_plan(services.store, policy, seed)


@router.get("/forecasts", response_model=ForecastsView, summary="Get the forecasts")
def forecasts(store: StoreDep) -> ForecastsView:
    """Return when unfinished jobs start and end, and how past forecasts turned out."""
    return list_forecasts(store)


@router.get(
    "/report",
    response_class=Response,
    responses={**refusals(404), **text_reply("text/html")},
    summary="Get the report as one HTML file",
)
def report(
    services: ServicesDep,
    caller: CallerDep,
    job: _Jobs = [],  # noqa: B006  # as above
    seconds: _Seconds = None,
) -> Response:
    """Return the report that `pipollux report` writes."""
    with caller.place(services.computing):
        page = kept_report(services.store, job, seconds)
    headers = {"Content-Disposition": "attachment; filename=report.html"}
    return Response(page, media_type="text/html", headers=headers)
