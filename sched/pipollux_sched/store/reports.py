"""Hints and training reports of jobs; those that arrive together share a transaction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from sqlalchemy import Row, delete, insert, select, update
from sqlalchemy.orm import Session

from pipollux_sched.lifecycle import FirstStep

from . import journal
from .errors import StoreError
from .records import Point, Timeline
from .tables import Base, EventRow, HintsRow, JobRow, MetricRow, PointRow

_JOBS = Base.metadata.tables[JobRow.__tablename__]
_HINTS = Base.metadata.tables[HintsRow.__tablename__]
_EVENTS = Base.metadata.tables[EventRow.__tablename__]
_POINTS = Base.metadata.tables[PointRow.__tablename__]
"""Tables instead of classes: rows that are not read again need no objects."""

_NOT_LOGGED = ("layers", "stepProfile")
"""Large hints that rarely change: events leave them out."""

MOST_VALUES = 2000
"""Largest number of stored values of one metric of a job."""
_INSERT_EVENTS = insert(_EVENTS).returning(_EVENTS.c.id, sort_by_parameter_order=True)
_PRESENT = select(
    *(_JOBS.c.name, _JOBS.c.attempt, _HINTS.c.job.is_not(None).label("known")),
    _HINTS.c.first_gradients,
).join(_HINTS, _HINTS.c.job == _JOBS.c.name, isouter=True)


class ReceivedHints(NamedTuple):
    """The hints of one job, as received."""

    job: str
    attempt: int
    hints: Mapping[str, Any]
    """The hints, as JSON."""


def keep_hints(
    session: Session, received: Sequence[ReceivedHints], now: float
) -> list[StoreError | None]:
    """Store the last hints of each job, and an event per hints; return for each any refusal."""
    present = _present_hints(session, {each.job for each in received})
    attempts = {job: row.attempt for job, row in present.items()}
    problems = [
        None if attempts.get(each.job) == each.attempt else _why_refused(session, each)
        for each in received
    ]
    kept = [each for each, problem in zip(received, problems, strict=True) if problem is None]
    first = {job: row.first_gradients for job, row in present.items()}
    for each in kept:
        first[each.job] = first[each.job] or each.hints.get("gradParams")
    latest = {
        each.job: {**_hints_row(each, now), "first_gradients": first[each.job]} for each in kept
    }
    known = {job for job, row in present.items() if row.known}
    _execute(session, insert(_HINTS), [row for job, row in latest.items() if job not in known])
    for job in latest.keys() & known:
        session.execute(update(_HINTS).where(_HINTS.c.job == job).values(latest[job]))
    _execute(session, insert(_EVENTS), [_hints_event(each, now) for each in kept])
    return problems


def _present_hints(session: Session, names: Collection[str]) -> dict[str, Row[Any]]:
    return {row.name: row for row in session.execute(_PRESENT.where(_JOBS.c.name.in_(names)))}


def _hints_row(received: ReceivedHints, now: float) -> dict[str, Any]:
    return {
        "job": received.job,
        "attempt": received.attempt,
        "time": now,
        "hints": dict(received.hints),
    }


def _hints_event(received: ReceivedHints, now: float) -> dict[str, Any]:
    kept = {key: value for key, value in received.hints.items() if key not in _NOT_LOGGED}
    entry = {**_hints_row(received, now), "type": "hints", "data": {"hints": kept}}
    del entry["hints"]
    return entry


def _execute(session: Session, statement: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        session.execute(statement, rows)


class MetricValue(NamedTuple):
    """A value of a metric of one job."""

    name: str
    step: int
    value: float | None
    """None: it was not finite."""


class ReceivedReport(NamedTuple):
    """A report of one job, as received."""

    job: str
    attempt: int
    points: Sequence[Point]
    timeline: Timeline | None = None
    metrics: Sequence[MetricValue] = ()


class _Present(NamedTuple):
    attempt: int
    trains: bool
    """Whether its first step was reported."""
    runs: bool


def keep_reports(
    session: Session, received: Sequence[ReceivedReport], now: float
) -> list[bool | Exception]:
    """Store reports; return for each whether it had the first step of its attempt, or an error."""
    present = _present(session, {each.job for each in received})
    outcomes: list[bool | Exception] = []
    beginning: list[ReceivedReport] = []
    events: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    for each in received:
        job = present.get(each.job)
        if job is None or job.attempt != each.attempt:
            outcomes.append(_why_refused(session, each))
            continue
        first = bool(each.points) and job.runs and not job.trains
        if first:
            beginning.append(each)
            present[each.job] = job._replace(trains=True)
        outcomes.append(first)
        events += _events(each, now)
        _keep_metrics(session, each, now)
        points += ({"job": each.job, **point.__dict__} for point in each.points)
    if not events:
        return outcomes
    _note_first_steps(session, beginning, now)
    session.flush()  # the transition of a first step comes before its points
    ids = session.scalars(_INSERT_EVENTS, events).all()
    kinds = (event["type"] for event in events)
    told = [number for number, kind in zip(ids, kinds, strict=True) if kind == "progress"]
    if points:
        rows = [{"event": n, **point} for n, point in zip(told, points, strict=True)]
        session.execute(insert(_POINTS), rows)
    return outcomes


def _keep_metrics(session: Session, received: ReceivedReport, now: float) -> None:
    """Store the metrics of a report; of very many values of a metric, keep evenly spread steps."""
    for metric in received.metrics:
        session.merge(MetricRow(job=received.job, time=now, **metric._asdict()))
    for name in {metric.name for metric in received.metrics}:
        mine = (MetricRow.job == received.job, MetricRow.name == name)
        steps = session.scalars(select(MetricRow.step).where(*mine)).all()
        if len(steps) <= MOST_VALUES:
            continue
        stride, kept = 1, set(steps)
        while len(kept) > MOST_VALUES // 2 and stride < max(steps):
            stride *= 2
            # The same steps for each trial, so that a pruner can compare them.
            kept = {step for step in steps if step % stride == 0}
        gone = [*mine, MetricRow.step != max(steps), MetricRow.step % stride != 0]
        session.execute(delete(MetricRow).where(*gone))


def _present(session: Session, names: Collection[str]) -> dict[str, _Present]:
    columns = _JOBS.c.name, _JOBS.c.attempt, _JOBS.c.training, _JOBS.c.running_on
    rows = session.execute(select(*columns).where(_JOBS.c.name.in_(names)))
    return {row.name: _Present(row.attempt, row.training, bool(row.running_on)) for row in rows}


def _why_refused(session: Session, received: ReceivedHints | ReceivedReport) -> StoreError:
    try:
        journal.check_present(journal.find_job(session, received.job), received.attempt)
    except StoreError as error:
        return error
    raise AssertionError(f"job {received.job} has changed within a transaction")


def _note_first_steps(session: Session, received: Sequence[ReceivedReport], now: float) -> None:
    found = session.scalars(select(JobRow).where(JobRow.name.in_([each.job for each in received])))
    rows = {row.name: row for row in found}
    present = journal.present_attempts(session, list(rows.values()))
    # Each is of another job, so none depends on the writes of another.
    with session.no_autoflush:
        for each in received:
            seconds = journal.restart_seconds(session, each.job, each.attempt, now)
            event = FirstStep(each.attempt, each.points[0].step, seconds)
            journal.advance_job(session, rows[each.job], event, now, present)


def _events(received: ReceivedReport, now: float) -> list[dict[str, Any]]:
    head: Mapping[str, Any] = {"time": now, "job": received.job, "attempt": received.attempt}
    events = [{**head, "type": "progress", "data": {}} for _ in received.points]
    if received.timeline is not None:
        events.append({**head, "type": "timeline", "data": asdict(received.timeline)})
    return events
