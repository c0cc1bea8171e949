"""Views of jobs: the list, the details of one, and its curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Protocol

from pipollux_sched.report.event_text import TELLING_TYPES
from pipollux_sched.spec.synchronization import synchronization
from pipollux_sched.store import JobOrder, JobQuery, JobRecord, StaleAttemptError, Store

from .changes import change_under_way
from .devices import devices_of_job
from .forecasts import job_forecast
from .models import JobCurves, JobDetails, ListedJob, NoiseView, ReplicaView
from .network import level_between
from .notifications import notification_view
from .sweeps import with_progress

NUM_EVENTS = 10
"""Number of newest events in a job's details."""


class SignOfLife(Protocol):
    """The last heartbeat of a replica."""

    @property
    def seconds(self) -> float:
        """Seconds since the heartbeat."""

    @property
    def step(self) -> int | None:
        """The replica's optimizer step; None if unknown."""

    @property
    def finished(self) -> bool:
        """Whether it was the replica's last heartbeat, because its script has ended."""


IN_ORDER = JobQuery(order=JobOrder.SUBMITTED)


def list_jobs(store: Store, query: JobQuery = IN_ORDER) -> tuple[list[ListedJob], int]:
    """Return a page of jobs, and the number of jobs on all pages."""
    jobs, num_found = store.find_jobs(query)
    # All jobs are read without their names: a database limits the values of one query.
    names = None if query.limit is None else [job.name for job in jobs]
    points, attempts = store.last_points(names), store.num_attempts(names)
    forecasts = store.forecasts.latest()
    listed = [
        ListedJob.of(
            job,
            num_attempts=attempts.get(job.name, 0),
            progress=points.get(job.name),
            forecast=job_forecast(forecasts, job),
        )
        for job in with_progress(store, jobs)
    ]
    return listed, num_found


def job_details(
    store: Store, job: JobRecord, heard: Mapping[int, SignOfLife] | None = None
) -> JobDetails:
    """Return the details of a job, with the stored heartbeats if `heard` is None."""
    attempts = store.attempts(job.name)
    hints, nodes = store.hints().get(job.name), job.state.running_on or job.state.assigned
    planned_by = None
    if hints is None and job.spec.get("hints") is None and not job.phase.ended:
        before = store.families.predecessors({job.name: job.spec}).get(job.name)
        planned_by = None if before is None else before.job
    num_starts = len({entry.attempt for entry in attempts})
    (told,) = with_progress(store, [job])
    return JobDetails.of(
        told,
        number=store.overview.job_number(job.name),
        num_restarts=max(num_starts - 1, 0),
        num_resizes=len(attempts) - num_starts,
        changing=change_under_way(job.state),
        attempts=[asdict(entry) for entry in attempts],
        replicas=_replicas(store, heard, job),
        progress=next(iter(store.overview.points(job.name, 1)), None),
        hints=hints,
        planned_by=planned_by,
        forecast=job_forecast(store.forecasts.latest(), job),
        synchronization=synchronization(hints, nodes, lambda: level_between(store, nodes)),
        devices=devices_of_job(store, job.name),
        events=store.latest_events(NUM_EVENTS, job=job.name, types=TELLING_TYPES),
        notifications=[
            notification_view(one) for one in store.notifications.recent(NUM_EVENTS, job=job.name)
        ],
    )


def job_curves(
    store: Store, job: JobRecord, heard: Mapping[int, SignOfLife], num_points: int
) -> JobCurves:
    """Return a job with its curves, of at most `num_points` points each."""
    return JobCurves(
        **dict(job_details(store, job, heard)),
        points=store.overview.points(job.name, num_points),
        noise=[
            NoiseView(**point._asdict()) for point in store.overview.noise(job.name, num_points)
        ],
    )


def _replicas(
    store: Store, heard: Mapping[int, SignOfLife] | None, job: JobRecord
) -> list[ReplicaView]:
    attempt, nodes = job.state.attempt, job.state.running_on
    if not nodes:
        return []
    try:
        addresses = store.replicas.find(job.name, attempt).addresses
    except StaleAttemptError:  # a newer attempt has started in the meantime
        addresses = {}
    if heard is None:
        heard = store.heartbeats.of(job.name, attempt)
    return [
        ReplicaView(
            replica=replica,
            node=node,
            address=addresses.get(replica),
            heard_seconds=heard[replica].seconds if replica in heard else None,
            step=heard[replica].step if replica in heard else None,
            finished=replica in heard and heard[replica].finished,
        )
        for replica, node in zip(job.state.membership.replicas, nodes, strict=True)
    ]
