"""Dependencies of the endpoints: the application's services, and authorization.

Example:
    ``def jobs(store: StoreDep) -> list[ListedJob]: ...``
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, HTTPException, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.concurrency import run_in_threadpool

from pipollux_sched.controller.commands import JobService
from pipollux_sched.lifecycle import ElasticReady, WaitingToJoin
from pipollux_sched.metrics import SchedulerMetrics
from pipollux_sched.spec.teams import JobOwner
from pipollux_sched.spec.tokens import Role
from pipollux_sched.store import (
    JobRecord,
    ReceivedHeartbeat,
    ReceivedHints,
    ReceivedReport,
    StateDir,
    Store,
)
from pipollux_sched.views.teams import stored_teams

from .auth import Auth
from .batcher import Batcher
from .change_watch import ChangeWatch
from .event_stream import Tail
from .limits import ConcurrencyLimit, Limits
from .prometheus import SchedulerCollector
from .report_pace import ReportPace
from .roles import ACCESS, Access, Caller


class Services:
    """The services that the endpoints of one application share."""

    def __init__(
        self,
        store: Store,
        control: JobService,
        state_dir: StateDir,
        admin_token: str,
        metrics: SchedulerMetrics,
        limits: Limits,
    ) -> None:
        self.store = store
        self.control = control
        self.state_dir = state_dir
        self.metrics = metrics
        self.limits = limits
        self.auth = Auth(store, admin_token, limits)
        self.changes = ChangeWatch(store)
        self.hints: Batcher[ReceivedHints, None] = Batcher(store.put_all_hints)
        self.reports: Batcher[ReceivedReport, bool] = Batcher(store.add_all_reports)
        self.heartbeats: Batcher[ReceivedHeartbeat, None] = Batcher(store.heartbeats.keep)
        self.beginnings: Batcher[str, None] = Batcher(control.note_training)
        self.words: Batcher[tuple[str, ElasticReady | WaitingToJoin], JobRecord] = Batcher(
            control.note_words
        )
        self.report_pace = ReportPace()
        self.tail = Tail(store)
        self.collector = SchedulerCollector(store)
        self.waiting = ConcurrencyLimit(limits.waiting, limits.waiting_per_job, "wait for replicas")
        self.computing = ConcurrencyLimit(
            limits.computing, limits.computing_per_user, "ask for plans, forecasts and reports"
        )
        self.listening = ConcurrencyLimit(
            limits.listeners,
            limits.listeners_per_user,
            "listen to events",
            reserved=min(limits.listeners_per_user, limits.listeners // 2),
        )


# Coroutines, because FastAPI runs plain functions in a thread per request.


async def get_services(request: Request) -> Services:
    """Return the services of the application."""
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(get_services)]


async def get_store(services: ServicesDep) -> Store:
    """Return the store."""
    return services.store


async def get_control(services: ServicesDep) -> JobService:
    """Return the object that carries out commands."""
    return services.control


StoreDep = Annotated[Store, Depends(get_store)]
ControlDep = Annotated[JobService, Depends(get_control)]

JobToken = Annotated[
    HTTPAuthorizationCredentials | None,
    Depends(
        HTTPBearer(
            scheme_name="jobToken",
            description=("The token of the job in the path, from PIPOLLUX_TOKEN of its processes."),
            auto_error=False,
        )
    ),
]
AdminToken = Annotated[
    HTTPAuthorizationCredentials | None,
    Depends(
        HTTPBearer(
            scheme_name="adminToken",
            description=(
                "The admin's token, from `admin.token` in the state directory, or a user's, whose "
                "role allows the request."
            ),
            auto_error=False,
        )
    ),
]


async def require_role(request: Request, services: ServicesDep, token: AdminToken) -> None:
    """Refuse requests that the sender's role does not allow: see `roles.ACCESS`."""
    caller = services.auth.identify(request, token)
    access = ACCESS.get((request.method, request.scope["route"].path), Access.ADMIN)
    why = caller.why_not(access)
    if why is None and access is Access.OWNER and caller.role is not Role.ADMIN:
        job = await run_in_threadpool(services.store.job, request.path_params["name"])
        if not caller.owns(job.spec.get("user")):
            why = f"job {job.name!r} is not one of {caller.name!r}; ask its user, or an admin"
    if why is None and access is Access.LOGS and caller.role is not Role.ADMIN:
        why = await run_in_threadpool(
            _why_no_logs, services.store, caller, request.path_params["name"]
        )
    if why is not None:
        raise HTTPException(403, why)
    request.state.caller, request.state.token = caller, token


def _why_no_logs(store: Store, caller: Caller, name: str) -> str | None:
    """Explain why a user may not read the logs of a job; None: allowed."""
    teams = stored_teams(store)
    if teams is None:
        return None
    job = JobOwner.of(store.job(name).spec)
    if caller.reads_logs_of(job, teams):
        return None
    return (
        f"the logs of job {name!r} are for its team {teams.team_of(job)!r}, and {caller.name!r} is "
        "not in it; ask an admin for a token of that team"
    )


async def get_caller(request: Request) -> Caller:
    """Return the sender of the request, as accepted by `require_role`."""
    caller: Caller = request.state.caller
    return caller


CallerDep = Annotated[Caller, Depends(get_caller)]


async def require_job(
    name: str, request: Request, services: ServicesDep, job: JobToken, admin: AdminToken
) -> None:
    """Refuse everyone but the job of the path and the admin."""
    await services.auth.admit_job(name, request, job or admin)


NeedsRole = Depends(require_role)
NeedsJob = Depends(require_job)
