"""Routes of teams: their quotas and usage."""

from __future__ import annotations

from fastapi import APIRouter

from pipollux_sched.server.dependencies import ControlDep, NeedsRole, StoreDep
from pipollux_sched.server.request_bodies import JsonRoute
from pipollux_sched.server.schemas import refusals
from pipollux_sched.spec.teams import TeamsSpec
from pipollux_sched.views.teams import TeamsView, list_teams

router = APIRouter(
    prefix="/teams",
    tags=["teams"],
    dependencies=[NeedsRole],
    responses=refusals(413),
    route_class=JsonRoute,
)


@router.get("", response_model=TeamsView, summary="List teams")
def teams(store: StoreDep) -> TeamsView:
    """Return the teams: quotas and limits, what each uses, borrows and lends, and its jobs."""
    return list_teams(store)


@router.put("", response_model=TeamsView, summary="Replace the teams")
def set_teams(control: ControlDep, store: StoreDep, teams: TeamsSpec) -> TeamsView:
    """Replace all teams, with their notifications, and priority classes, and decide at once.

    Answers leave out the destinations of notifications.
    """
    control.set_teams(teams)
    return list_teams(store)


@router.delete("", response_model=TeamsView, summary="Remove all teams")
def remove_teams(control: ControlDep, store: StoreDep) -> TeamsView:
    """Remove all teams; decisions no longer consider teams."""
    control.set_teams(None)
    return list_teams(store)
