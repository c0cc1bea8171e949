"""What jobs and users ask over HTTP: hints, reports, and the jobs themselves.

=======  ======================  ======  ==========================================================
PUT      /jobs/{name}/hints      job     hints of a generation (`SchedHints`)
POST     /jobs/{name}/reports    job     progress of a generation (`TrainingReport`)
GET      /healthz                none    whether the scheduler is there
POST     /jobs                   admin   submit a job (`JobSpec`)
GET      /jobs                   admin   all jobs
GET      /jobs/{name}            admin   one job, with its launches and latest hints
DELETE   /jobs/{name}            admin   cancel a job
POST     /jobs/{name}/suspend    admin   let a job save and hold nothing
POST     /jobs/{name}/resume     admin   let it be given room again
GET      /jobs/{name}/logs       admin   the last lines of its replicas
GET      /events                 admin   the event log
GET      /cluster                admin   nodes and free slots
POST     /decisions              admin   let the allocator decide now
GET      /nodes                  admin   the same nodes, as a list
PUT      /nodes/{name}           admin   let a node be ready, drain, or be dead
=======  ======================  ======  ==========================================================

Every request but `/healthz` bears a token: the admin's opens everything, a job's only its own two
rows. Whatever a job sends is checked, limited in size, and refused when a newer generation of the
job is there. Every refusal is ``{"detail": "one sentence"}``.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import ValidationError

from pipollux_perfmodel import HintsError, SchedHints
from pipollux_sched.backend.replica_log import last_lines
from pipollux_sched.body_limit import BodyLimit
from pipollux_sched.control import Control, UnavailableError
from pipollux_sched.spec import SpecError, parse_job
from pipollux_sched.store import (
    ConflictError,
    NodeCondition,
    StateDir,
    Store,
    StoreError,
    UnknownJobError,
    UnknownNodeError,
)
from pipollux_sched.training_report import TrainingReport
from pipollux_sched.validation import problems

BODY_LIMIT = 2**20
"""Largest request body, in bytes."""

_Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


async def _json_object(request: Request) -> dict[str, Any]:
    """Read a body that is to be a JSON object, whatever its Content-Type says."""
    try:
        value = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise HTTPException(422, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise HTTPException(
            422, f"the body is a JSON {type(value).__name__}; send an object, {{…}}"
        )
    return value


_Object = Annotated[dict[str, Any], Depends(_json_object)]
_Generation = Annotated[int, Query(ge=1)]


def create_app(store: Store, control: Control, *, state_dir: StateDir, admin_token: str) -> FastAPI:
    """Make the application that answers jobs and users.

    Args:
        store: what is known.
        control: carries out what is asked.
        state_dir: where the jobs' logs are.
        admin_token: opens everything.
    """
    app = FastAPI(title="Pipollux", docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, limit=BODY_LIMIT)
    _answer_errors(app)
    app.include_router(_job_side(store, control, admin_token))
    app.include_router(_admin_side(store, control, state_dir, admin_token))

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    return app


def _job_side(store: Store, control: Control, admin_token: str) -> APIRouter:
    def authorise(name: str, credentials: _Bearer) -> None:
        if credentials is not None:
            if _equal(credentials.credentials, admin_token):
                return
            try:
                if _equal(credentials.credentials, store.job(name).token):
                    return
            except UnknownJobError:
                pass  # whoever does not know the admin's token is not told which jobs there are
        raise _unauthorised(f"this needs the token of job {name!r}")

    router = APIRouter(prefix="/jobs/{name}", dependencies=[Depends(authorise)])

    @router.put("/hints", status_code=204)
    def put_hints(name: str, generation: _Generation, body: _Object) -> None:
        hints = SchedHints.from_json_object(body)
        store.put_hints(name, generation, hints.to_json_object())

    @router.post("/reports", status_code=204)
    def post_report(name: str, body: _Object) -> None:
        report = _report(body)
        first = store.add_report(
            name, report.generation, report.stored_points(), report.stored_timeline()
        )
        if first:
            control.settled(name)

    return router


def _admin_side(store: Store, control: Control, state_dir: StateDir, admin_token: str) -> APIRouter:
    def authorise(credentials: _Bearer) -> None:
        if credentials is None or not _equal(credentials.credentials, admin_token):
            raise _unauthorised(f"this needs the admin token, which {state_dir.server} holds")

    router = APIRouter(dependencies=[Depends(authorise)])

    @router.post("/jobs", status_code=201)
    def submit(body: _Object) -> dict[str, Any]:
        return control.submit(parse_job(body)).to_json_object()

    @router.get("/jobs")
    def jobs() -> list[dict[str, Any]]:
        return [job.to_json_object() for job in store.jobs()]

    @router.get("/jobs/{name}")
    def job(name: str) -> dict[str, Any]:
        record = store.job(name).to_json_object()
        hints = store.hints().get(name)
        return {**record, "hints": hints, "generations": store.generations(name)}

    @router.delete("/jobs/{name}")
    def cancel(name: str) -> dict[str, Any]:
        return control.cancel(name).to_json_object()

    @router.post("/jobs/{name}/suspend")
    def suspend(name: str) -> dict[str, Any]:
        return control.suspend(name).to_json_object()

    @router.post("/jobs/{name}/resume")
    def resume(name: str) -> dict[str, Any]:
        return control.resume(name).to_json_object()

    @router.get("/jobs/{name}/logs")
    def logs(name: str, tail: Annotated[int, Query(ge=1, le=10_000)] = 100) -> list[dict[str, Any]]:
        store.job(name)
        return [
            {"generation": generation, "replica": replica, "lines": last_lines(path, tail)}
            for generation, replica, path in state_dir.logs(name)
        ]

    @router.get("/events")
    def events(
        after: Annotated[int, Query(ge=0, le=2**62)] = 0,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> list[dict[str, Any]]:
        return store.events(after, limit=limit)

    @router.get("/cluster")
    def cluster() -> Mapping[str, Any]:
        return control.cluster()

    @router.post("/decisions", status_code=202)
    def decide() -> dict[str, str]:
        control.decide()
        return {"status": "deciding"}

    @router.get("/nodes")
    def nodes() -> list[dict[str, Any]]:
        return [{"name": name, **node} for name, node in control.cluster()["nodes"].items()]

    @router.put("/nodes/{name}")
    def set_node(name: str, body: _Object) -> dict[str, Any]:
        try:
            condition = NodeCondition(str(body.get("condition")))
        except ValueError:
            raise HTTPException(422, "condition: give ready, draining or dead") from None
        return asdict(control.set_node(name, condition, str(body.get("reason", ""))))

    return router


def _equal(given: str, wanted: str) -> bool:
    """Compare tokens in a time that does not tell how much of them is right."""
    return hmac.compare_digest(given.encode(), wanted.encode())


def _unauthorised(what: str) -> HTTPException:
    detail = f"{what}, as in the header 'Authorization: Bearer TOKEN'"
    return HTTPException(401, detail, headers={"WWW-Authenticate": "Bearer"})


def _report(body: Mapping[str, Any]) -> TrainingReport:
    try:
        return TrainingReport.model_validate(body)
    except ValidationError as error:
        problem = problems(error, TrainingReport)[0]
        raise HTTPException(422, f"report: {problem.sentence()}") from None


def _answer_errors(app: FastAPI) -> None:
    statuses: Sequence[tuple[type[Exception], int]] = (
        (UnknownJobError, 404),
        (UnknownNodeError, 404),
        (ConflictError, 409),
        (StoreError, 500),
        (HintsError, 422),
        (SpecError, 422),
        (UnavailableError, 503),
    )
    for kind, status in statuses:
        app.add_exception_handler(kind, _answer(status))
    app.add_exception_handler(RequestValidationError, _answer_invalid)


def _answer(status: int) -> Any:
    def handler(_request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error).partition("\n")[0]}, status_code=status)

    return handler


def _answer_invalid(_request: Request, error: Exception) -> JSONResponse:
    """Say in one sentence what is wrong with a request that is not even of the right form."""
    assert isinstance(error, RequestValidationError)  # noqa: S101  # it is registered for no other
    first = error.errors()[0]
    where = ".".join(str(step) for step in first["loc"])
    detail = f"{where}: {first['msg']}"
    return JSONResponse({"detail": detail}, status_code=422)
