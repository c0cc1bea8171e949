"""Queries on attempts, within a session of the store: their number, cost and slot-seconds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, String, case, cast, distinct, func, select, true
from sqlalchemy.orm import InstrumentedAttribute, Session

from pipollux_sched.lifecycle import Intent, Outcome, Phase

from .records import AttemptRecord, attempt_record
from .tables import AttemptRow, JobRow

ENDED = tuple(phase.value for phase in Phase if phase.ended)
"""Phases of ended jobs: in a store of several months, nearly all jobs."""
CHANGED = "changed"
"""Outcome of a membership that ended with an elastic resize."""
RESTART_WEIGHT = 0.3
"""Weight of the newest restart in the moving average of restart costs."""


def has_reason(conditions: InstrumentedAttribute[Any], reason: str) -> ColumnElement[bool]:
    """Return whether one of a job's conditions has a reason."""
    # A quote within a message is escaped as \", so this matches only a condition's own reason.
    return cast(conditions, String).contains(f'"reason": "{reason}"')


class AttemptCounts(NamedTuple):
    """Restarts, failures and resizes of jobs since the store was created."""

    restarts: int
    """Attempts of a job after its first."""
    reallocations: int
    """Attempts that were stopped to move the job."""
    failures: int
    """Attempts that failed by themselves."""
    resizes: int
    """Memberships that began while their job trained: replicas joined, left or were lost."""


def totals(session: Session, name: str | None = None) -> AttemptCounts:
    """Return the counts of a job; without a name, of all existing jobs."""
    row = AttemptRow
    failed = (row.outcome == Outcome.FAILED.value) & row.intent.is_(None)
    begun = row.membership == 1
    query = select(
        func.count().filter(begun) - func.count(distinct(row.job)),
        func.count().filter(row.intent == Intent.MOVE.value),
        func.count().filter(failed),
        func.count().filter(~begun),
    ).select_from(row)
    if name is not None:
        query = query.where(row.job == name)
    return AttemptCounts(*session.execute(query).one())


def among_jobs(name: InstrumentedAttribute[Any], *, unfinished: bool) -> ColumnElement[bool]:
    """Return the condition on a job's name that it has not ended; unless `unfinished`, none."""
    if not unfinished:
        return true()
    return name.in_(select(JobRow.name).where(JobRow.phase.not_in(ENDED)))


def of_job(session: Session, name: str) -> list[AttemptRecord]:
    """Return the attempts of a job, oldest first."""
    query = select(AttemptRow).where(AttemptRow.job == name).order_by(AttemptRow.id)
    return [attempt_record(row) for row in session.scalars(query)]


def count(session: Session, names: Collection[str] | None, *, unfinished: bool) -> dict[str, int]:
    """Return the number of attempts of each of the named jobs (None: of all)."""
    counts = (
        select(AttemptRow.job, func.count().label("attempts"))
        .where(among_jobs(AttemptRow.job, unfinished=unfinished), AttemptRow.membership == 1)
        .group_by(AttemptRow.job)
    )
    if names is not None:
        counts = counts.where(AttemptRow.job.in_(names))
    return {row.job: row.attempts for row in session.execute(counts)}


def restart_seconds(session: Session, name: str | None = None) -> dict[str, list[float]]:
    """Return the seconds of each measured restart, by job; `name` None: of unfinished jobs."""
    return _costs(session, AttemptRow.restart_seconds, name)


def pause_seconds(session: Session, name: str | None = None) -> dict[str, list[float]]:
    """Return the pause of each elastic resize in seconds, like `restart_seconds`."""
    return _costs(session, AttemptRow.pause_seconds, name)


def _costs(
    session: Session, cost: InstrumentedAttribute[float | None], name: str | None
) -> dict[str, list[float]]:
    whose = among_jobs(AttemptRow.job, unfinished=True) if name is None else AttemptRow.job == name
    query = (
        select(AttemptRow.job, cost.label("seconds"))
        .where(whose, cost.is_not(None))
        .order_by(AttemptRow.id)
    )
    found: dict[str, list[float]] = {}
    for row in session.execute(query):
        found.setdefault(row.job, []).append(row.seconds)
    return found


def attained_service(session: Session, now: float, *, unfinished: bool) -> dict[str, float]:
    """Return the slot-seconds of each job, summed over its attempts."""
    held = func.coalesce(AttemptRow.ended_at, now) - AttemptRow.created_at
    slots = AttemptRow.num_replicas * AttemptRow.num_stages
    service = func.sum(case((held > 0, held), else_=0.0) * slots).label("service")
    sums = (
        select(AttemptRow.job, service)
        .where(among_jobs(AttemptRow.job, unfinished=unfinished))
        .group_by(AttemptRow.job)
    )
    return {row.job: row.service for row in session.execute(sums)}


def moving_average(values: Sequence[float], default: float) -> float:
    """Return the exponentially weighted moving average of `values`; `default` if empty.

    Example:
        >>> moving_average([10.0, 20.0], 30.0)
        13.0
    """
    if not values:
        return default
    average = values[0]
    for value in values[1:]:
        average += RESTART_WEIGHT * (value - average)
    return average
