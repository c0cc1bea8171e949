"""Routes of jobs about themselves, with their own tokens."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool

from pipollux_protocol.messages import (
    MOST_ATTEMPTS,
    Heartbeat,
    HeartbeatAnswer,
    InheritanceAnswer,
    ReplicaAddress,
    ReplicaAddresses,
    ReplicaRegistration,
    ReportAnswer,
    Stop,
    TrainingReport,
)
from pipollux_sched.controller.training_report import (
    stored_metrics,
    stored_points,
    stored_timeline,
)
from pipollux_sched.lifecycle import ElasticReady, WaitingToJoin
from pipollux_sched.server.dependencies import NeedsJob, Services, ServicesDep, StoreDep
from pipollux_sched.server.request_bodies import JsonRoute
from pipollux_sched.server.schemas import heartbeat_answer, inheritance_answer, refusals
from pipollux_sched.spec.hints import HintsField
from pipollux_sched.store import Discovery, ReceivedHints, ReceivedReport
from pipollux_sched.store.replicas import check_replica

MAX_WAIT = 60.0
"""Largest wait of a request for replicas, in seconds."""

_Attempt = Annotated[
    int, Query(ge=1, le=MOST_ATTEMPTS, description="The sender's attempt: PIPOLLUX_ATTEMPT.")
]
_Wait = Annotated[
    float,
    Query(
        ge=0,
        le=MAX_WAIT,
        allow_inf_nan=False,
        description="Seconds to wait until all replicas are registered.",
    ),
]


router = APIRouter(
    prefix="/jobs/{name}",
    tags=["jobs' own"],
    dependencies=[NeedsJob],
    responses=refusals(404, 409, 413),
    route_class=JsonRoute,
)


@router.put("/hints", status_code=204, summary="Send hints")
async def put_hints(name: str, services: ServicesDep, attempt: _Attempt, hints: HintsField) -> None:
    """Store the latest hints: the job's measurements, from which its goodput is predicted."""
    await services.hints.put(ReceivedHints(name, attempt, hints.to_json_object()))
    services.metrics.hints.inc()


@router.get("/inheritance", summary="Get the measurements of related jobs")
def get_inheritance(name: str, store: StoreDep, attempt: _Attempt) -> InheritanceAnswer:
    """Return the measured step times of jobs of the same family, including running ones."""
    job = store.job(name)
    check_replica(name, job.state.attempt, len(job.state.running_on), attempt)
    return inheritance_answer(store.families.relatives(name, job.spec))


@router.post("/reports", summary="Report progress")
async def post_report(name: str, services: ServicesDep, report: TrainingReport) -> ReportAnswer:
    """Store the progress since the last report and, occasionally, the timeline of a step.

    The answer has the interval until the next report, which grows with the number of jobs.
    """
    points, timeline = stored_points(report), stored_timeline(report)
    received = ReceivedReport(name, report.attempt, points, timeline, stored_metrics(report))
    first = await services.reports.put(received)
    services.metrics.reports.inc()
    if first:
        await services.beginnings.put(name)
    return ReportAnswer(again=services.report_pace.note(name))


@router.post("/heartbeats", summary="Send a heartbeat")
async def post_heartbeat(name: str, services: ServicesDep, heartbeat: Heartbeat) -> HeartbeatAnswer:
    """Record a heartbeat; each replica sends one every few seconds, or the job restarts.

    After a heartbeat with `finished` no more are expected. The answer to a heartbeat with `elastic`
    has the next step of an elastic resize.
    """
    # Nearly all are answered from memory, without a thread or the database: heartbeats are the most
    # frequent requests of a scheduler of ten thousand replicas.
    job = services.store.present.get(name)
    if job is None:
        job = await run_in_threadpool(services.store.present.find, name)
    state = job.state
    num_ids = state.membership.num_ids if state.running_on else 0
    check_replica(name, state.attempt, num_ids, heartbeat.attempt, heartbeat.replica)
    # Loading, compiling and measuring before an attempt's first step may take long.
    hang_timeout = job.spec.get("hang_timeout") if state.training else None
    control = services.control
    urgent = control.heard(
        name,
        heartbeat.attempt,
        heartbeat.replica,
        heartbeat.step,
        hang_timeout,
        finished=heartbeat.finished,
    )
    if urgent is not None:
        await services.heartbeats.put(urgent)
    services.metrics.heartbeats.inc()
    if heartbeat.elastic is None:
        return HeartbeatAnswer(network_level=control.levels.of(state.running_on))
    events = control.hear_word(job, heartbeat.replica, heartbeat.elastic)
    match events:
        case []:
            pass
        case [ElasticReady() | WaitingToJoin() as event]:  # possibly thousands at once
            job = await services.words.put((name, event))
        case _:
            job = await run_in_threadpool(control.follow_word, job, events)
    answer = control.answer(job, heartbeat.replica)
    return heartbeat_answer(job.state, answer, control.levels.of)


@router.post("/stops", status_code=204, summary="Report the step of a saved stop")
def post_stop(name: str, store: StoreDep, stop: Stop) -> None:
    """Store the step at which the replicas agreed to stop, once its checkpoint is written.

    The work up to that step is safe, however the processes end.
    """
    store.launches.note_stop(name, stop.attempt, stop.step)


@router.post("/replicas", status_code=204, summary="Register a replica")
def post_replica(name: str, store: StoreDep, replica: ReplicaRegistration) -> None:
    """Store a replica's address until the attempt ends; it replaces an earlier one."""
    store.replicas.register(name, replica.attempt, replica.replica, replica.address)


@router.get("/replicas", summary="Discover the replicas")
async def get_replicas(
    name: str, services: ServicesDep, attempt: _Attempt, wait: _Wait = 0.0
) -> ReplicaAddresses:
    """Wait until all replicas of the attempt are registered; return the registered replicas.

    409 if the attempt is no longer the current one.
    """
    with services.waiting.take(name):
        found = await _discover(services, name, attempt, wait)
    places = [
        ReplicaAddress(replica=replica, address=address)
        for replica, address in found.addresses.items()
    ]
    return ReplicaAddresses(
        attempt=attempt, num_replicas=found.num_replicas, complete=found.complete, replicas=places
    )


async def _discover(services: Services, name: str, attempt: int, wait: float) -> Discovery:
    store, changes = services.store, services.changes
    clock = asyncio.get_running_loop().time
    deadline = clock() + wait
    async with changes.listening():
        while True:
            version = changes.version
            found = await run_in_threadpool(store.replicas.find, name, attempt)
            left = deadline - clock()
            if found.complete or left <= 0 or changes.closed:
                return found
            await changes.wait(version, left)
