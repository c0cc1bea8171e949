"""Routes of the scheduler itself: health check and metrics."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from pipollux_sched.server.dependencies import ServicesDep
from pipollux_sched.server.prometheus import render
from pipollux_sched.server.schemas import Health, text_reply

VERSION = version("pipollux")

router = APIRouter(tags=["service"])
metrics_router = APIRouter(tags=["service"])
"""Separate, because `create_app` decides whether metrics need the admin's token."""


@router.get("/healthz", summary="Check the health of the scheduler")
async def healthz() -> Health:
    """Return the scheduler's version; needs no token."""
    return Health(status="ok", version=VERSION)


@metrics_router.get(
    "/metrics",
    response_class=Response,
    responses=text_reply("text/plain"),
    summary="Get Prometheus metrics",
)
def metrics(services: ServicesDep) -> Response:
    """Return the metrics in Prometheus text format."""
    return Response(render(services.metrics, services.collector), media_type=CONTENT_TYPE_LATEST)
