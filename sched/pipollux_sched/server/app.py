"""The application: the paths of both sides, and what stands before and behind them."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import version

from fastapi import Depends, FastAPI, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from pipollux_sched.controller.commands import Control
from pipollux_sched.metrics import Meters
from pipollux_sched.server.routes.admin import admin_side
from pipollux_sched.server.routes.job import job_side
from pipollux_sched.server.routes.overview import overview_side
from pipollux_sched.store import StateDir, Store

from .auth import Gate
from .body_limit import BodyLimit
from .change_watch import News
from .docs_page import render_docs
from .errors import answer_errors
from .host_check import HostCheck
from .limits import Limits
from .openapi import document
from .prometheus import RefusedCounter, SchedulerCollector, render
from .web_page import add_pages

BODY_LIMIT = 2**20
"""Largest request body, in bytes."""


def create_app(
    store: Store,
    control: Control,
    *,
    state_dir: StateDir,
    admin_token: str,
    meters: Meters | None = None,
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
        meters: what the scheduler counts; None: new ones.
        limits: how much is answered; None: the usual.
        open_metrics: whether `/metrics` needs no token.
        hosts: names that are answered to, besides those of the loopback interface.
    """
    meters, limits = meters or Meters(), limits or Limits()
    gate = Gate(store, state_dir, admin_token, limits)
    news = News(store)
    app = FastAPI(title="Pipollux", openapi_url=None)
    app.state.news = news
    app.add_middleware(BodyLimit, limit=BODY_LIMIT)
    app.add_middleware(HostCheck, hosts=hosts)
    app.add_middleware(RefusedCounter, meters=meters)
    answer_errors(app)
    app.include_router(job_side(store, control, meters, gate, news, limits))
    app.include_router(admin_side(store, control, state_dir, gate, news, limits))
    app.include_router(overview_side(store, control, gate))
    _add_health(app)
    _add_docs(app)
    add_pages(app)
    _add_metrics(app, meters, SchedulerCollector(store, control), gate, open_metrics)
    return app


def end_waiting(app: FastAPI) -> None:
    """End the streams and long polls of an application, because its server is about to stop."""
    news: News = app.state.news
    news.close()


def _add_health(app: FastAPI) -> None:
    @app.get("/healthz", tags=["service"], summary="Whether the scheduler is there")
    async def healthz() -> dict[str, str]:
        """Needs no token."""
        return {"status": "ok"}


def _add_docs(app: FastAPI) -> None:
    made = version("pipollux")

    @app.get("/openapi.json", include_in_schema=False)
    def openapi() -> JSONResponse:
        return JSONResponse(document(app, made))

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return HTMLResponse(render_docs(document(app, made)), headers=headers)


def _add_metrics(
    app: FastAPI, meters: Meters, collector: SchedulerCollector, gate: Gate, is_open: bool
) -> None:
    @app.get(
        "/metrics",
        tags=["service"],
        summary="Figures for Prometheus",
        dependencies=[] if is_open else [Depends(gate.admit_admin)],
        response_class=Response,
    )
    def metrics() -> Response:
        """In Prometheus' text format."""
        return Response(render(meters, collector), media_type=CONTENT_TYPE_LATEST)
