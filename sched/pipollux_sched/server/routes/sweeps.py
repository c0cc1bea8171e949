"""Routes of sweeps; all commands on a sweep are those on jobs."""

from __future__ import annotations

from fastapi import APIRouter

from pipollux_sched.server.dependencies import NeedsRole, StoreDep
from pipollux_sched.server.schemas import refusals
from pipollux_sched.views.models import SweepDetails, SweepView
from pipollux_sched.views.sweeps import list_sweeps, sweep_details

router = APIRouter(
    prefix="/sweeps", tags=["sweeps"], dependencies=[NeedsRole], responses=refusals(404)
)


@router.get("", response_model=list[SweepView], summary="List sweeps")
def sweeps(store: StoreDep) -> list[SweepView]:
    """Return all sweeps, in the order of submission."""
    return list_sweeps(store)


@router.get("/{name}", response_model=SweepDetails, summary="Get a sweep and its trials")
def sweep(name: str, store: StoreDep) -> SweepDetails:
    """Return a sweep with the table of its trials: parameters, state, metric."""
    return sweep_details(store, name)
