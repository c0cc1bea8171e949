"""Records of transitions, within a transaction of the store: state, attempts, events."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, NamedTuple

from sqlalchemy import ScalarSelect, Select, and_, func, or_, select
from sqlalchemy.orm import Session, aliased

from pipollux_sched.lifecycle import (
    Action,
    Cancel,
    ElasticReady,
    Event,
    Exited,
    FirstStep,
    Intent,
    JobState,
    Phase,
    Record,
    Recover,
    Resume,
    Start,
    Started,
    Stop,
    Survived,
    Suspend,
    Switched,
    advance,
)
from pipollux_utils.text import count, listing

from . import dependencies, sweeps
from .attempts import CHANGED, ENDED
from .errors import JobEndedError, StaleAttemptError, UnknownJobError
from .heartbeats import drop_heartbeats
from .records import JobRecord, Point, job_record, job_state, write_job_state
from .tables import AttemptRow, EventRow, JobRow, PointRow

APART: frozenset[type[Event]] = frozenset({ElasticReady, Started})
"""Events that concern only their job, and do not change its attempt."""


_MOST_NAMED = 5
"""Jobs that a message names one by one."""


class Change(NamedTuple):
    """The result of a transition."""

    job: JobRecord
    actions: tuple[Action, ...]
    """The actions to carry out, in order; everything to be recorded is recorded."""


def find_job(session: Session, name: str) -> JobRow:
    """Return the row of a job, or raise `UnknownJobError`."""
    row = session.scalar(select(JobRow).where(JobRow.name == name))
    if row is None:
        raise UnknownJobError(f"no job is named {name!r}; {_known_jobs(session)}")
    return row


def _known_jobs(session: Session) -> str:
    """Return the latest jobs as a clause, without the trials of sweeps, which may be thousands."""
    jobs = select(JobRow.name).where(JobRow.trial.is_(None))
    known = session.scalars(jobs.order_by(JobRow.id.desc()).limit(_MOST_NAMED)).all()
    others = (session.scalar(select(func.count()).select_from(jobs.subquery())) or 0) - len(known)
    if not known:
        return "there is no job yet"
    names = [*reversed(known), *([count(others, "other")] if others else [])]
    return f"there {'are' if len(names) > 1 else 'is'} {listing(names)}"


def check_present(row: JobRow, attempt: int) -> None:
    """Raise `StaleAttemptError` unless `attempt` is the current one of the job."""
    if attempt != row.attempt:
        raise StaleAttemptError(
            f"attempt {attempt} of job {row.name!r} is not the current one "
            f"({row.attempt}); its report is refused"
        )


def advance_job(
    session: Session,
    row: JobRow,
    event: Event,
    now: float,
    present: Mapping[str, AttemptRow] | None = None,
) -> Change:
    """Apply an event to a job, and record all consequences.

    For several jobs, `present` has the rows of `present_attempts`, read at once. `JobEndedError`: a
    user's request needs an unfinished job.
    """
    before = job_state(row)
    _check_asked(row.name, before, event)
    after, actions = advance(before, event, now)
    write_job_state(row, after)
    if after.phase.ended and not before.phase.ended:
        row.ended_at = now
    _keep_event(session, row.name, before, event, now, present)
    if (
        isinstance(event, Switched | Survived)
        and after.membership.number != before.membership.number
    ):
        _keep_membership(session, row.name, after, event, now)
    for action in actions:
        _keep_action(session, row, after, action, now)
    if after.phase.ended and not before.phase.ended:
        if row.trial is not None:
            sweeps.end_trial(session, row, after)
        # Nothing of these jobs runs, so there is nothing to carry out.
        for waiting in dependencies.waiting_for(session, row.name):
            advance_job(session, waiting, dependencies.end_of(row.name, after), now)
    todo = tuple(action for action in actions if not isinstance(action, Record))
    return Change(job_record(row), todo)


def advance_all(
    session: Session, events: Sequence[tuple[str, Event]], now: float
) -> list[Change | None]:
    """Apply events to jobs in order; None for an unknown job."""
    names = {name for name, _ in events}
    found = session.scalars(select(JobRow).where(JobRow.name.in_(names))).all()
    rows = {row.name: row for row in found}
    # For different jobs, these events do not depend on each other's writes.
    apart = len(names) == len(events) and {type(event) for _, event in events} <= APART
    present = present_attempts(session, found) if apart else None
    with session.no_autoflush if apart else nullcontext():
        return [
            advance_job(session, rows[name], event, now, present) if name in rows else None
            for name, event in events
        ]


def _check_asked(name: str, state: JobState, event: Event) -> None:
    """Refuse a user's request that the job's state rules out, within the transaction."""
    asked = {Cancel: "cancelled", Suspend: "suspended", Resume: "resumed"}.get(type(event))
    if asked is None or not state.phase.ended:
        return
    again = "" if state.phase is Phase.COMPLETE else "; to resume it, submit it again"
    raise JobEndedError(
        f"job {name!r} has ended ({state.phase}, {state.reason}) and cannot be {asked}{again}"
    )


def _keep_event(
    session: Session,
    name: str,
    before: JobState,
    event: Event,
    now: float,
    present: Mapping[str, AttemptRow] | None,
) -> None:
    if not isinstance(event, Started | FirstStep | Exited | Recover) or not before.running_on:
        return
    row = find_attempt(session, name, before.attempt) if present is None else present.get(name)
    if row is None or (not isinstance(event, Recover) and event.attempt != before.attempt):
        return
    if isinstance(event, Exited | Recover):
        drop_heartbeats(session, name, before.attempt)
    match event:
        case Started():
            row.started_at = now
        case FirstStep() if not before.training:
            row.first_step_at, row.first_step = now, event.step
            row.restart_seconds = event.restart_seconds
        case Exited():
            row.ended_at, row.outcome = now, event.outcome.value
            row.intent = before.intent.value if before.intent else None
        case Recover():
            row.ended_at, row.outcome = now, "lost"


def _keep_membership(
    session: Session, name: str, after: JobState, event: Switched | Survived, now: float
) -> None:
    """End the row of the previous membership, and begin the next one."""
    before = find_attempt(session, name, after.attempt)
    if before is None:
        return
    before.ended_at, before.outcome = now, CHANGED
    session.add(
        AttemptRow(
            job=name,
            attempt=after.attempt,
            membership=after.membership.number,
            nodes=list(after.running_on),
            num_replicas=len(after.running_on),
            num_stages=before.num_stages,
            created_at=now,
            started_at=now,
            first_step_at=now,
            first_step=event.step,
            pause_seconds=event.seconds,
        )
    )


def _keep_action(
    session: Session, job: JobRow, state: JobState, action: Action, now: float
) -> None:
    name = job.name
    match action:
        case Record():
            log(session, now, action.type, name, action.attempt, action.data)
        case Start():
            created = AttemptRow(
                job=name,
                attempt=action.attempt,
                nodes=list(action.nodes),
                num_replicas=len(action.nodes),
                num_stages=action.num_stages or job.spec.get("num_stages", 1),
                created_at=now,
            )
            session.add(created)
            if action.attempt > 1:
                drop_heartbeats(session, name, action.attempt - 1)
        case Stop():
            row = find_attempt(session, name, state.attempt)
            if row is not None:
                row.stopping_at = now


def find_attempt(session: Session, name: str, attempt: int) -> AttemptRow | None:
    """Return the row of an attempt's last membership; None if there is none."""
    mine = (AttemptRow.job == name, AttemptRow.attempt == attempt)
    query = select(AttemptRow).where(*mine).order_by(AttemptRow.membership.desc())
    return session.scalar(query.limit(1))


def present_attempts(session: Session, rows: Sequence[JobRow]) -> dict[str, AttemptRow]:
    """Return the rows of the last memberships of jobs' current attempts, by job."""
    mine = and_(AttemptRow.job == JobRow.name, AttemptRow.attempt == JobRow.attempt)
    query = select(AttemptRow).join(JobRow, mine).order_by(AttemptRow.membership)
    named = query.where(JobRow.name.in_([row.name for row in rows]))
    return {row.job: row for row in session.scalars(named)}


def restart_seconds(session: Session, name: str, attempt: int, now: float) -> float | None:
    """Return the seconds since the previous attempt was asked to stop for this one, if it was."""
    before = find_attempt(session, name, attempt - 1) if attempt > 1 else None
    if before is None or before.intent != Intent.MOVE.value or before.stopping_at is None:
        return None
    return max(now - before.stopping_at, 0.0)


def log(
    session: Session,
    now: float,
    kind: str,
    job: str | None,
    attempt: int | None,
    data: Mapping[str, Any],
) -> EventRow:
    """Append an event to the log."""
    row = EventRow(time=now, type=kind, job=job, attempt=attempt, data=dict(data))
    session.add(row)
    return row


class StartingJob(NamedTuple):
    """A job whose processes run and have taken no step yet."""

    name: str
    attempt: int
    spec: Mapping[str, Any]
    started_at: float


class RunTime(NamedTuple):
    """The time that the processes of a job have run, in seconds."""

    name: str
    used: float
    limit: float


def overdue(session: Session, now: float) -> list[JobRecord]:
    """Return the unfinished jobs whose deadline has passed without having been applied."""
    final = (Intent.CANCEL.value, Intent.EXPIRE.value)
    query = select(JobRow).where(
        JobRow.deadline_at <= now,
        JobRow.phase.not_in(ENDED),
        or_(JobRow.intent.is_(None), JobRow.intent.not_in(final)),
    )
    return [job_record(row) for row in session.scalars(query)]


def over_run_time(session: Session, now: float) -> list[RunTime]:
    """Return the running jobs whose processes have run for longer than `max_run_time`."""
    limit = JobRow.spec["max_run_time"].as_float()
    limited = (
        select(JobRow.name, limit.label("limit"))
        .join(AttemptRow, and_(AttemptRow.job == JobRow.name, AttemptRow.attempt == JobRow.attempt))
        .where(
            JobRow.phase.not_in(ENDED),
            limit.is_not(None),
            JobRow.intent.is_(None),
            AttemptRow.started_at.is_not(None),
            AttemptRow.ended_at.is_(None),
        )
    )
    found = []
    for name, most in session.execute(limited).all():
        used = _run_time(session, name, now)
        if used >= most:
            found.append(RunTime(name, used, most))
    return found


def _run_time(session: Session, name: str, now: float) -> float:
    """Return the seconds that a job's processes have run since it was last submitted or rerun."""
    begun = select(func.max(EventRow.time)).where(
        EventRow.job == name, EventRow.type.in_(("submitted", "rerun"))
    )
    since = session.scalar(begun) or 0.0
    rows = session.execute(
        select(AttemptRow.started_at, AttemptRow.ended_at).where(
            AttemptRow.job == name,
            AttemptRow.created_at >= since,
            AttemptRow.started_at.is_not(None),
        )
    )
    return sum(((now if end is None else end) - (start or now) for start, end in rows), 0.0)


def starting(session: Session) -> list[StartingJob]:
    """Return the jobs whose processes run and have taken no step yet."""
    query = (
        select(JobRow.name, JobRow.attempt, JobRow.spec, AttemptRow.started_at)
        .join(AttemptRow, and_(AttemptRow.job == JobRow.name, AttemptRow.attempt == JobRow.attempt))
        .where(
            JobRow.phase.not_in(ENDED),
            JobRow.training.is_(False),
            JobRow.intent.is_(None),
            AttemptRow.started_at.is_not(None),
            AttemptRow.ended_at.is_(None),
        )
    )
    return [
        StartingJob(name, attempt, spec, started_at)
        for name, attempt, spec, started_at in session.execute(query)
        if started_at is not None
    ]


def last_points(session: Session, names: Collection[str] | None) -> dict[str, Point]:
    """Return the latest progress by job (None: of all); jobs without reports are left out."""
    query = select(PointRow).join(JobRow, PointRow.event == newest_point())
    if names is not None:
        query = query.where(JobRow.name.in_(names))
    return {row.job: point_of(row) for row in session.scalars(query)}


def newest_point() -> ScalarSelect[Any]:
    """Return the latest point of a job: one index lookup per job instead of a scan of all."""
    other = aliased(PointRow)
    latest = select(func.max(other.event)).where(other.job == JobRow.name)
    return latest.correlate(JobRow).scalar_subquery()


def point_of(row: PointRow) -> Point:
    """Return a copy of a row of progress."""
    return Point(**{name: getattr(row, name) for name in Point.__dataclass_fields__})


def events_of(job: str | None, types: Collection[str] | None) -> Select[EventRow, PointRow]:
    """Return the query for events with their points; None: all jobs, all types."""
    query = select(EventRow, PointRow).join(PointRow, PointRow.event == EventRow.id, isouter=True)
    if job is not None:
        query = query.where(EventRow.job == job)
    return query if types is None else query.where(EventRow.type.in_(types))


def event_object(row: EventRow, point: PointRow | None) -> dict[str, Any]:
    """Return an event as one flat object."""
    data = asdict(point_of(point)) if point is not None else row.data
    head = {"id": row.id, "type": row.type, "job": row.job, "attempt": row.attempt}
    return {"time": row.time, **head, **data}
