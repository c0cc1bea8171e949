"""The application: the paths of both sides, and what stands before and behind them."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse

from pipollux_sched.controller.commands import Control
from pipollux_sched.metrics import Metrics
from pipollux_sched.store import StateDir, Store

from .dependencies import NeedsAdmin, Services
from .docs_page import render_docs
from .errors import answer_errors
from .host_check import HostCheck
from .limits import Limits
from .openapi import document
from .prometheus import RefusedCounter
from .request_bodies import BODY_LIMIT, BodyLimit
from .routes import events, job_side, jobs, nodes, overview, service
from .web_page import add_pages


def create_app(
    store: Store,
    control: Control,
    *,
    state_dir: StateDir,
    admin_token: str,
    metrics: Metrics | None = None,
    limits: Limits | None = None,
    open_metrics: bool = False,
    hosts: Collection[str] = (),
) -> FastAPI:
    """Make the application that answers jobs and users.

    Args:
        store: what is known.
        control: carries out what is asked.
        state_dir: where the jobs' logs are.
        admin_token: opens everything.
        metrics: what the scheduler counts; None: new ones.
        limits: how much is answered; None: the usual.
        open_metrics: whether `/metrics` needs no token.
        hosts: names that are answered to, besides those of the loopback interface.
    """
    metrics = metrics or Metrics()
    app = FastAPI(title="Pipollux", openapi_url=None)
    app.state.services = Services(
        store, control, state_dir, admin_token, metrics, limits or Limits()
    )
    app.add_middleware(BodyLimit, limit=BODY_LIMIT)
    app.add_middleware(HostCheck, hosts=hosts)
    app.add_middleware(RefusedCounter, metrics=metrics)
    answer_errors(app)
    for part in (job_side, jobs, nodes, events, overview, service):
        app.include_router(part.router)
    app.include_router(service.metrics_router, dependencies=[] if open_metrics else [NeedsAdmin])
    _add_docs(app)
    add_pages(app)
    return app


def end_waiting(app: FastAPI) -> None:
    """End the streams and long polls of an application, because its server is about to stop."""
    services: Services = app.state.services
    services.changes.close()


def _add_docs(app: FastAPI) -> None:
    made = version("pipollux")

    @app.get("/openapi.json", include_in_schema=False)
    def openapi() -> JSONResponse:
        return JSONResponse(document(app, made))

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return HTMLResponse(render_docs(document(app, made)), headers=headers)
