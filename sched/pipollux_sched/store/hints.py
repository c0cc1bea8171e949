"""Hints reported by jobs; those that arrive together share a transaction, the main cost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from . import journal
from .errors import StoreError
from .tables import Base, EventRow, HintsRow, JobRow

_JOBS = Base.metadata.tables[JobRow.__tablename__]
_HINTS = Base.metadata.tables[HintsRow.__tablename__]
_EVENTS = Base.metadata.tables[EventRow.__tablename__]
"""Tables instead of classes: rows that are not read again need no objects."""

_NOT_LOGGED = ("layers", "stepProfile")
"""Large hints that rarely change: events leave them out."""

_PRESENT = select(_JOBS.c.name, _JOBS.c.attempt, _HINTS.c.job.is_not(None).label("known")).join(
    _HINTS, _HINTS.c.job == _JOBS.c.name, isouter=True
)


class ReceivedHints(NamedTuple):
    """The hints of one job, as received."""

    job: str
    attempt: int
    hints: Mapping[str, Any]
    """The hints, as JSON."""


def keep(
    session: Session, received: Sequence[ReceivedHints], now: float
) -> list[StoreError | None]:
    """Store the last hints of each job, and an event per hints; return for each any refusal."""
    present, known = _present(session, {each.job for each in received})
    problems = [_problem(session, present, each) for each in received]
    kept = [each for each, problem in zip(received, problems, strict=True) if problem is None]
    latest = {each.job: _row(each, now) for each in kept}
    _execute(session, insert(_HINTS), [row for job, row in latest.items() if job not in known])
    for job in latest.keys() & known:
        session.execute(update(_HINTS).where(_HINTS.c.job == job).values(latest[job]))
    _execute(session, insert(_EVENTS), [_event(each, now) for each in kept])
    return problems


def _present(session: Session, names: Collection[str]) -> tuple[dict[str, int], set[str]]:
    rows = session.execute(_PRESENT.where(_JOBS.c.name.in_(names))).all()
    return {row.name: row.attempt for row in rows}, {row.name for row in rows if row.known}


def _problem(
    session: Session, present: Mapping[str, int], received: ReceivedHints
) -> StoreError | None:
    if present.get(received.job) == received.attempt:
        return None
    try:
        journal.check_present(journal.find_job(session, received.job), received.attempt)
    except StoreError as error:
        return error
    return None


def _row(received: ReceivedHints, now: float) -> dict[str, Any]:
    return {
        "job": received.job,
        "attempt": received.attempt,
        "time": now,
        "hints": dict(received.hints),
    }


def _event(received: ReceivedHints, now: float) -> dict[str, Any]:
    kept = {key: value for key, value in received.hints.items() if key not in _NOT_LOGGED}
    entry = {**_row(received, now), "type": "hints", "data": {"hints": kept}}
    del entry["hints"]
    return entry


def _execute(session: Session, statement: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        session.execute(statement, rows)
