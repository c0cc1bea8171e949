"""Routes of jobs for users, with their tokens or the admin's."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from pipollux_sched.backend.replica.last_words import last_lines
from pipollux_sched.forecasting.new_jobs import forecast_new
from pipollux_sched.planning import explain
from pipollux_sched.server.dependencies import (
    CallerDep,
    ControlDep,
    NeedsRole,
    Services,
    ServicesDep,
    StoreDep,
)
from pipollux_sched.server.request_bodies import JsonRoute
from pipollux_sched.server.roles import Caller
from pipollux_sched.server.schemas import refusals, text_reply
from pipollux_sched.spec.job import JobBatch, JobSpec
from pipollux_sched.spec.names import Name
from pipollux_sched.spec.tokens import Role
from pipollux_sched.store import ListedPhase, UnknownJobError
from pipollux_sched.store.log_files import has_log
from pipollux_sched.views.cluster import MOST_JOBS
from pipollux_sched.views.explanation import ExplanationView
from pipollux_sched.views.jobs import IN_ORDER, job_curves, list_jobs
from pipollux_sched.views.logs import OFFSET_HEADER, read_log
from pipollux_sched.views.models import (
    DeletedJobView,
    JobCurves,
    JobForecastView,
    JobView,
    ListedJob,
    LogTail,
)

TOTAL_HEADER = "X-Total-Count"
"""Header with the number of jobs on all pages."""
MOST_POINTS = 500
"""Largest number of points per curve, more than the pixels of a chart."""

_Points = Annotated[
    int, Query(ge=0, le=MOST_POINTS, description="Largest number of points per curve; 0: none.")
]
_FromScratch = Annotated[
    bool, Query(description="Start from scratch, not from the last checkpoint.")
]
_Tail = Annotated[
    int, Query(ge=0, le=10_000, description="Number of lines per log; 0: list the logs only.")
]
_Only = Annotated[int | None, Query(ge=1, le=2**31, description="Only logs of this attempt.")]
_Phases = Annotated[list[ListedPhase], Query(description="Only jobs in one of these phases.")]
_Name = Annotated[
    str, Query(max_length=255, description="Only jobs whose name contains this, ignoring case.")
]
_FirstJob = Annotated[int, Query(ge=0, le=2**31, description="Number of jobs to skip.")]
_Limit = Annotated[
    int | None, Query(ge=0, le=MOST_JOBS, description="Largest number of jobs; none: all.")
]
_Trials = Annotated[bool, Query(description="Whether trials of sweeps are listed.")]
_Number = Annotated[int, Path(ge=1, le=2**31, description="Number of the attempt.")]
_Replica = Annotated[int, Path(ge=0, le=2**31, description="Number of the replica.")]
_Offset = Annotated[int, Query(ge=0, le=2**62, description="Offset to start at, in bytes.")]


class TeamChange(BaseModel):
    """The new team of a job."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    team: Name = Field(description="a name, as in vision")


router = APIRouter(
    prefix="/jobs",
    tags=["jobs"],
    dependencies=[NeedsRole],
    responses=refusals(404, 409, 413),
    route_class=JsonRoute,
)


@router.post("", status_code=201, response_model=JobView, summary="Submit a job")
def submit(services: ServicesDep, caller: CallerDep, job: JobSpec) -> dict[str, Any]:
    """Submit a job; after a 201 it is stored, and starts as soon as slots are free."""
    return services.control.submit(_signed(services, caller, job)).to_json_object()


@router.post("/batch", status_code=201, response_model=list[JobView], summary="Submit several jobs")
def submit_all(services: ServicesDep, caller: CallerDep, batch: JobBatch) -> list[dict[str, Any]]:
    """Submit all jobs or none: if one is refused, the error names it, and nothing changes."""
    jobs = [_signed(services, caller, job) for job in batch.jobs]
    return [job.to_json_object() for job in services.control.submit_all(jobs)]


@router.post("/forecast", response_model=list[JobForecastView], summary="Forecast new jobs")
def forecast(services: ServicesDep, caller: CallerDep, batch: JobBatch) -> list[JobForecastView]:
    """Return when jobs would start and end if they were submitted now; store nothing.

    409 also if there are no forecasts, with the reason.
    """
    jobs = [_signed(services, caller, job) for job in batch.jobs]
    with caller.place(services.computing):
        return forecast_new(services.store, services.state_dir, services.control.check(jobs))


def _signed(services: Services, caller: Caller, job: JobSpec) -> JobSpec:
    """Return a job in the sender's name, under an unused name, for its user's system user."""
    signed = caller.signed(job)
    if caller.role is Role.ADMIN:  # admins may submit thousands at once
        if signed.user is None or signed.run_as is not None:
            return signed
        return signed.model_copy(update={"run_as": services.auth.account_of(signed.user)})
    try:
        before = services.store.job(job.name)
    except UnknownJobError:
        return signed
    if not caller.owns(before.spec.get("user")):
        raise HTTPException(
            403, f"job {job.name!r} is not one of {caller.name!r}; give yours another name"
        )
    return signed


@router.get("", response_model=list[ListedJob], summary="List jobs")
def jobs(
    store: StoreDep,
    response: Response,
    phase: _Phases = [],  # noqa: B006  # FastAPI's way
    name: _Name = "",
    offset: _FirstJob = 0,
    limit: _Limit = None,
    trials: _Trials = True,
) -> list[ListedJob]:
    """Return jobs in the order of their first submission, with their latest progress.

    The header `X-Total-Count` has the number of jobs on all pages.
    """
    wanted = replace(IN_ORDER, phases=phase, name=name.strip(), trials=trials)
    query = replace(wanted, offset=offset, limit=limit)
    found, num_found = list_jobs(store, query)
    response.headers[TOTAL_HEADER] = str(num_found)
    return found


@router.get("/{name}", response_model=JobCurves, summary="Get a job and its curves")
def job(
    name: str, store: StoreDep, control: ControlDep, points: _Points = MOST_POINTS
) -> JobCurves:
    """Return a job: attempts, hints, replicas, last events, progress, gradient noise."""
    found = store.job(name)
    heard = control.heartbeats.heard(name, found.state.attempt)
    return job_curves(store, found, heard, points)


@router.delete("/{name}", response_model=JobView, summary="Cancel a job")
def cancel(name: str, control: ControlDep) -> dict[str, Any]:
    """Cancel a job and end its processes; 409 if it has ended already."""
    return control.cancel(name).to_json_object()


@router.post("/{name}/suspend", response_model=JobView, summary="Suspend a job")
def suspend(name: str, control: ControlDep) -> dict[str, Any]:
    """Suspend a job: it checkpoints and releases its slots; 409 if it has ended."""
    return control.suspend(name).to_json_object()


@router.post("/{name}/resume", response_model=JobView, summary="Resume a suspended job")
def resume(name: str, control: ControlDep) -> dict[str, Any]:
    """Resume a job from its checkpoint as soon as slots are free; 409 if it has ended."""
    return control.resume(name).to_json_object()


@router.post("/{name}/rerun", response_model=JobView, summary="Run an ended job again")
def rerun(
    name: str,
    control: ControlDep,
    store: StoreDep,
    caller: CallerDep,
    from_scratch: _FromScratch = False,
) -> dict[str, Any]:
    """Rerun a job; 409 if it has not ended, or is complete and `from_scratch` is not set."""
    caller.check_team(name, store.job(name).spec.get("team"), "submit it again")
    return control.rerun(name, from_scratch=from_scratch).to_json_object()


@router.put("/{name}/team", response_model=JobView, summary="Move a job to another team")
def move(name: str, control: ControlDep, caller: CallerDep, change: TeamChange) -> dict[str, Any]:
    """Move a job to another team from the next decision on; 409 if the team is full."""
    caller.check_team(name, change.team, "ask an admin to move it")
    return control.move(name, change.team).to_json_object()


@router.post("/{name}/delete", response_model=DeletedJobView, summary="Delete an ended job")
def delete(name: str, control: ControlDep) -> DeletedJobView:
    """Delete a job, its logs, events and checkpoints, except its own `checkpoint_dir`; 409 if it
    has not ended.
    """
    deleted = control.delete(name)
    state = deleted.job.state
    return DeletedJobView(
        name=name, phase=state.phase, reason=state.reason, left=list(map(str, deleted.left))
    )


@router.get(
    "/{name}/explanation", response_model=ExplanationView, summary="Explain a job's allocation"
)
def explanation(name: str, store: StoreDep) -> ExplanationView:
    """Explain a job's allocation: the last decision, alternatives, limits."""
    return explain.explanation(store, store.job(name))


@router.get(
    "/{name}/logs", response_model=list[LogTail], summary="Get the last lines of a job's logs"
)
def logs(
    name: str, services: ServicesDep, tail: _Tail = 100, attempt: _Only = None
) -> list[LogTail]:
    """Return the last lines of each replica of each attempt with a log."""
    services.store.job(name)
    services.control.fetch_logs(name)
    return [
        LogTail(attempt=number, replica=replica, lines=last_lines(path, tail))
        for number, replica, path in services.state_dir.logs(name)
        if attempt in (None, number)
    ]


@router.get(
    "/{name}/logs/{attempt}/{replica}",
    response_class=Response,
    responses=text_reply("application/octet-stream"),
    summary="Get the log of a replica",
)
def log(
    name: str, attempt: _Number, replica: _Replica, services: ServicesDep, offset: _Offset = 0
) -> Response:
    """Return up to 1 MiB of a log from an offset, unchanged.

    The header `Pipollux-Log-Offset` has the next offset.
    """
    state = services.store.job(name).state
    services.control.fetch_logs(name)
    # A replica may have started without any output yet.
    runs = attempt == state.attempt and replica < max(state.membership.num_ids, 1)
    if not runs and not has_log(services.state_dir.log(name, attempt, replica)):
        raise HTTPException(
            404,
            f"there is no log of attempt {attempt}, replica {replica} of job {name!r}; "
            f"GET /jobs/{name}/logs lists the existing logs",
        )
    part = read_log(services.state_dir, name, attempt, replica, offset)
    headers = {OFFSET_HEADER: str(part.offset)}
    return Response(part.content, media_type="application/octet-stream", headers=headers)
