"""Jobs as users ask for them, with the admin's token."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from pipollux_sched.server import views
from pipollux_sched.server.dependencies import ControlDep, NeedsAdmin, ServicesDep, StoreDep
from pipollux_sched.server.request_bodies import JsonRoute
from pipollux_sched.server.schemas import (
    DeletedReply,
    ExplanationReply,
    JobPageReply,
    JobReply,
    LogReply,
    refusals,
)
from pipollux_sched.spec.job import JobBatch, JobSpec

MOST_POINTS = 500
"""Points of a job's curves: more than a picture of them has pixels for."""

_Points = Annotated[
    int, Query(ge=0, le=MOST_POINTS, description="Points of each curve at most; 0: no curves.")
]
_FromScratch = Annotated[
    bool, Query(description="Start from scratch, not from its last checkpoint.")
]
_Tail = Annotated[int, Query(ge=1, le=10_000, description="Lines of each.")]
_Only = Annotated[int | None, Query(ge=1, le=2**31, description="Only of this one.")]

router = APIRouter(
    prefix="/jobs",
    tags=["jobs"],
    dependencies=[NeedsAdmin],
    responses=refusals(404, 409, 413),
    route_class=JsonRoute,
)


@router.post("", status_code=201, response_model=JobReply, summary="Submit a job")
def submit(control: ControlDep, job: JobSpec) -> dict[str, Any]:
    """What was answered with 201 is on the disk, and starts as soon as something is free."""
    return control.submit(job).to_json_object()


@router.post(
    "/batch", status_code=201, response_model=list[JobReply], summary="Submit many jobs at once"
)
def submit_all(control: ControlDep, batch: JobBatch) -> list[dict[str, Any]]:
    """All of them or none: where one is refused, the sentence names it, and nothing changes."""
    return [job.to_json_object() for job in control.submit_all(batch.jobs)]


@router.get("", response_model=list[JobReply], summary="All jobs")
def jobs(store: StoreDep) -> list[dict[str, Any]]:
    """In the order of their first submission."""
    return [job.to_json_object() for job in store.jobs()]


@router.get("/{name}", response_model=JobPageReply, summary="One job, with its curves")
def job(
    name: str, store: StoreDep, control: ControlDep, points: _Points = MOST_POINTS
) -> dict[str, Any]:
    """With its generations, latest hints, replicas, progress and gradient noise."""
    return views.describe_job(store, control.heartbeats, store.job(name), points)


@router.delete("/{name}", response_model=JobReply, summary="Cancel a job")
def cancel(name: str, control: ControlDep) -> dict[str, Any]:
    """Its processes end; 409 where the job has ended already."""
    return control.cancel(name).to_json_object()


@router.post("/{name}/suspend", response_model=JobReply, summary="Suspend a job")
def suspend(name: str, control: ControlDep) -> dict[str, Any]:
    """It saves, ends its processes, and holds nothing until resumed; 409 where it has ended."""
    return control.suspend(name).to_json_object()


@router.post("/{name}/resume", response_model=JobReply, summary="Resume a suspended job")
def resume(name: str, control: ControlDep) -> dict[str, Any]:
    """It goes on from its checkpoint as soon as something is free; 409 where it has ended."""
    return control.resume(name).to_json_object()


@router.post("/{name}/rerun", response_model=JobReply, summary="Run a job again that has ended")
def rerun(name: str, control: ControlDep, from_scratch: _FromScratch = False) -> dict[str, Any]:
    """As it was submitted; 409 where it has not ended, or is complete and not to start again."""
    return control.rerun(name, from_scratch=from_scratch).to_json_object()


@router.post("/{name}/delete", response_model=DeletedReply, summary="Delete a job that has ended")
def delete(name: str, control: ControlDep) -> dict[str, Any]:
    """With its logs, events and checkpoints, but for a `checkpoint_dir` of its own; 409 where
    it has not ended.
    """
    return views.deleted_object(control.delete(name))


@router.get(
    "/{name}/explanation", response_model=ExplanationReply, summary="Explain a job's allocation"
)
def explanation(name: str, store: StoreDep) -> dict[str, Any]:
    """What `pipollux explain` tells: the last decision, alternatives, limits."""
    return views.explain_job(store, store.job(name))


@router.get(
    "/{name}/logs", response_model=list[LogReply], summary="The last lines of a job's replicas"
)
def logs(
    name: str, services: ServicesDep, tail: _Tail = 100, generation: _Only = None
) -> list[dict[str, Any]]:
    """Of every replica of every generation whose log is kept."""
    services.store.job(name)
    return views.describe_logs(services.state_dir, name, generation, tail)
