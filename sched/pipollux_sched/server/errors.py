"""Error responses: each is ``{"detail": "one sentence"}`` with the matching status."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic_core import ErrorDetails
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Mount
from starlette.types import ExceptionHandler

from pipollux_sched.controller.commands import UnavailableError
from pipollux_sched.forecasting.process import ForecastError
from pipollux_sched.planning.dry_run import PolicyFailedError
from pipollux_sched.report.run_events import NothingToReportError
from pipollux_sched.spec.job import SpecError
from pipollux_sched.store import (
    ConflictError,
    DependencyError,
    StoreError,
    StoreTakenError,
    StoreUnavailableError,
    UnknownChannelError,
    UnknownJobError,
    UnknownNodeError,
    UnknownReplicaError,
    UnknownTokenError,
)
from pipollux_utils.text import THIN_SPACE
from pipollux_utils.validation import expected, problems, spell_value

from .limits import BusyError, TooManyRequestsError

MOST_WORDS = 1000

_LOG = logging.getLogger(__name__)

STATUSES: Sequence[tuple[type[Exception], int]] = (
    (UnknownJobError, 404),
    (UnknownNodeError, 404),
    (UnknownTokenError, 404),
    (UnknownChannelError, 404),
    (UnknownReplicaError, 422),
    (ConflictError, 409),
    (StoreUnavailableError, 503),
    (StoreTakenError, 503),
    (DependencyError, 422),
    (StoreError, 500),
    (SpecError, 422),
    (TooManyRequestsError, 429),
    (NothingToReportError, 404),
    (PolicyFailedError, 500),
    (ForecastError, 409),
    (UnavailableError, 503),
    (BusyError, 503),
)
"""Status by error class; for subclasses, the most specific entry counts."""


def answer_errors(app: FastAPI) -> None:
    """Register handlers that answer every error of an application in one sentence."""
    for kind, status in STATUSES:
        app.add_exception_handler(kind, _answer(status))
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(DBAPIError, _answer_database)
    app.add_exception_handler(Exception, _answer_failure)


def refusal(status: int, sentence: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return the response that refuses a request, with the sentence on one line."""
    lines = (line.strip() for line in sentence.splitlines())
    text = "; ".join(line for line in lines if line)
    printable = "".join(
        c if c.isprintable() or c == THIN_SPACE else f"\\x{ord(c):02x}" for c in text[:MOST_WORDS]
    )
    return JSONResponse({"detail": printable}, status_code=status, headers=headers)


def _answer(status: int) -> ExceptionHandler:
    def handler(_request: Request, error: Exception) -> JSONResponse:
        seconds = getattr(error, "retry_after", None)
        headers = None if seconds is None else {"Retry-After": str(seconds)}
        return refusal(status, str(error), headers)

    return handler


def _answer_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)  # noqa: S101  # it is registered for no other
    first = error.errors()[0]
    where, *place = first["loc"]
    if where != "body":
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            return refusal(422, f"{name}: is missing; give it")
        if first["type"] == "value_error":
            return refusal(422, f"{name}: {first['ctx']['error']}")
        shown = spell_value(first["input"])
        return refusal(422, f"{name}: {shown} is not allowed; it must be {expected(first)}")
    if isinstance(first["input"], HTTPException):  # the body could not be parsed
        return _answer_http(request, first["input"])
    if not place and first["type"] == "missing":
        return refusal(422, "the body is not valid JSON: it is empty; send a JSON object, {…}")
    field = request.scope["route"].body_field
    inside = (
        cast("ErrorDetails", {**details, "loc": details["loc"][1:]}) for details in error.errors()
    )
    found = problems(inside, field.field_info.annotation)
    return refusal(422, "; ".join(f"{field.name}: {problem.sentence()}" for problem in found))


def _answer_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)  # noqa: S101  # it is registered for no other
    detail, headers = error.detail, dict(error.headers or {})
    if detail == "Not Found":
        detail = f"there is no path {request.url.path[:200]!r}; /docs lists the paths"
    elif detail == "Method Not Allowed":
        # The framework names those of the first route of the path only.
        methods = _methods(request)
        headers["Allow"] = ", ".join(methods)
        where = f"{request.method} is not allowed on {request.url.path[:200]!r}"
        detail = f"{where}; use {' or '.join(methods)}"
    return refusal(error.status_code, detail, headers)


def _methods(request: Request) -> list[str]:
    """Return the methods that the path of a request has."""
    routes = [route for route in request.app.routes if not isinstance(route, Mount)]

    def has(method: str) -> bool:
        asked = {**request.scope, "method": method}
        return any(route.matches(asked)[0] is Match.FULL for route in routes)

    return list(filter(has, ("GET", "POST", "PUT", "DELETE"))) or ["GET"]  # files are mounted


def _answer_database(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, DBAPIError)  # noqa: S101  # it is registered for no other
    _LOG.error("%s %s: the store failed: %s", request.method, request.url.path, error.orig)
    sentence = f"the store cannot be used just now ({error.orig}); nothing was changed, ask again"
    return refusal(503, sentence, {"Retry-After": "5"})


def _answer_failure(_request: Request, _error: Exception) -> JSONResponse:
    return refusal(500, "the scheduler failed on this request; see its log")
