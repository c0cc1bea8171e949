"""The FastAPI application: the routes for jobs and users, with their middleware."""

from __future__ import annotations

import functools
from collections.abc import Collection
from importlib.metadata import version

from fastapi import APIRouter, FastAPI
from starlette.routing import BaseRoute

from pipollux_sched.controller.commands import JobService
from pipollux_sched.metrics import SchedulerMetrics
from pipollux_sched.store import StateDir, Store

from .dependencies import NeedsRole, Services
from .errors import answer_errors
from .fast_path import FastPath
from .host_check import HostCheck
from .limits import Limits
from .overload import Overload
from .prometheus import RefusedCounter
from .request_bodies import BODY_LIMIT, BodyLimit
from .routes import (
    events,
    job_side,
    jobs,
    nodes,
    notifications,
    overview,
    service,
    sweeps,
    teams,
    tokens,
)
from .schemas import refusals
from .swagger_page import add_docs
from .web_page import add_pages

DESCRIPTION = (
    "Requests need a token in the header `Authorization: Bearer TOKEN`, except those for "
    "`/healthz`, `/docs`, `/openapi.json` and the web page at `/`. "
    "A token is a job's own, a user's, or the admin's, which allows everything. "
    "Bodies are JSON objects of at most 1 MiB. Every refusal is an object with one sentence, "
    "`detail`."
)
TAGS = {
    "jobs' own": "Requests of jobs about themselves, with their own token.",
    "jobs": "Submit, watch and end jobs.",
    "sweeps": "The trials of sweeps. A sweep is submitted, suspended and cancelled as a job.",
    "nodes": "The nodes of the cluster, and their condition.",
    "teams": "Quotas and usage of teams.",
    "tokens": "Tokens of users, with their roles; for admins.",
    "notifications": "Channels of users, and notifications sent to them.",
    "events": "Past events and the live event stream.",
    "service": "The scheduler itself.",
}


def create_app(
    store: Store,
    control: JobService,
    *,
    state_dir: StateDir,
    admin_token: str,
    metrics: SchedulerMetrics | None = None,
    limits: Limits | None = None,
    open_metrics: bool = False,
    hosts: Collection[str] = (),
) -> FastAPI:
    """Return the application; `hosts` are accepted besides those of the loopback interface."""
    metrics = metrics or SchedulerMetrics()
    app = FastAPI(
        title="Pipollux",
        version=version("pipollux"),
        description=DESCRIPTION,
        openapi_tags=[{"name": name, "description": about} for name, about in TAGS.items()],
        docs_url=None,
        redoc_url=None,
    )
    limits = limits or Limits()
    app.state.services = Services(store, control, state_dir, admin_token, metrics, limits)
    app.router.routes.append(FastPath(app.state.services))
    app.add_middleware(Overload, limits=limits)
    app.add_middleware(BodyLimit, limit=BODY_LIMIT)
    app.add_middleware(HostCheck, hosts=hosts)
    app.add_middleware(RefusedCounter, metrics=metrics)
    answer_errors(app)
    app.router.routes.extend(_routes(open_metrics=open_metrics))
    add_docs(app)
    add_pages(app)
    return app


@functools.cache
def _routes(*, open_metrics: bool) -> tuple[BaseRoute, ...]:
    """Return the routes, without anything of an application: FastAPI analyses each when it is first
    matched, which takes a tenth of a second for all, once per process.
    """
    router = APIRouter(generate_unique_id_function=lambda route: route.name)
    for part in (
        *(job_side, jobs, sweeps, nodes, teams, tokens, notifications, events, overview),
        service,
    ):
        router.include_router(part.router)
    if open_metrics:
        router.include_router(service.metrics_router)
    else:
        router.include_router(
            service.metrics_router, dependencies=[NeedsRole], responses=refusals()
        )
    return tuple(router.routes)


def end_waiting(app: FastAPI) -> None:
    """End the streams and long polls of an application whose server is about to stop."""
    services: Services = app.state.services
    services.changes.close()
