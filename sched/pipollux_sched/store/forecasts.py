"""Forecasts of jobs: the latest ones as one document, and records for comparison as events."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from sqlalchemy import func, select

from pipollux_sched.lifecycle import Phase

from . import journal
from .attempts import ENDED
from .database import Database
from .tables import AttemptRow, EventRow, JobRow, MetaRow

_LATEST = "forecasts"
_RECORD = "forecast"
_MOST_RECORDS = 50


class StoredForecast(NamedTuple):
    """A forecast of a job; infinite moments are None."""

    made_at: float
    start: Mapping[str, float | None] | None
    """`low`, `median` and `high`, in seconds since the epoch; None: it had started."""
    end: Mapping[str, float | None]
    uncorrected_end: Mapping[str, float | None]
    """The same, without the correction by past errors."""
    note: str | None = None
    """What it leaves out, or why nothing is known."""
    uncorrected_start: Mapping[str, float | None] | None = None
    """`start` without its correction by past errors."""
    running_seconds: float | None = None
    """Median of the running time without the correction by past errors; None: it had started."""


class PastForecast(NamedTuple):
    """A recorded forecast of a job that has completed since."""

    job: str
    spec: Mapping[str, Any]
    forecast: StoredForecast
    submitted_at: float
    started_at: float
    ended_at: float


class ForecastRecords:
    """The forecasts of a store."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def latest(self) -> dict[str, StoredForecast]:
        """Return the latest forecast by job; jobs that have ended since may be among them."""
        with self._database.read() as session:
            text = session.scalar(select(MetaRow.value).where(MetaRow.key == _LATEST))
        found = {} if text is None else json.loads(text)
        return {name: StoredForecast(*values) for name, values in found.items()}

    def keep(self, forecasts: Mapping[str, StoredForecast], record: Collection[str] = ()) -> None:
        """Replace the latest forecasts, and record those of some jobs for later comparison."""
        with self._database.write(durable=False) as session:
            session.merge(MetaRow(key=_LATEST, value=json.dumps(forecasts)))
            there = set(session.scalars(select(JobRow.name).where(JobRow.name.in_(record))))
            for name in sorted(there):
                data = forecasts[name]._asdict()
                journal.log(session, self._clock(), _RECORD, name, None, data)

    def last_records(self) -> dict[str, float]:
        """Return when the last record of each unfinished job was made."""
        query = (
            select(EventRow.job, func.max(EventRow.time))
            .join(JobRow, JobRow.name == EventRow.job)
            .where(EventRow.type == _RECORD, JobRow.phase.not_in(ENDED))
            .group_by(EventRow.job)
        )
        with self._database.read() as session:
            return {str(row[0]): float(row[1]) for row in session.execute(query)}

    def first_record(self, job: str, after: Collection[str]) -> StoredForecast | None:
        """Return the first recorded forecast of a job since the last event of some types.

        The first one with a bounded end, if there is one.
        """
        mine = EventRow.job == job
        with self._database.read() as session:
            last = select(func.max(EventRow.id)).where(mine, EventRow.type.in_(after))
            since = session.scalar(last) or 0
            query = select(EventRow.data).where(mine, EventRow.type == _RECORD, EventRow.id > since)
            rows = session.scalars(query.order_by(EventRow.id).limit(_MOST_RECORDS)).all()
        found = [StoredForecast(**data) for data in rows]
        bounded = (one for one in found if one.end["high"] is not None)
        return next(bounded, found[0] if found else None)

    def past(self, most: int) -> list[PastForecast]:
        """Return the newest records of jobs that have completed since, oldest first.

        Jobs that were run again are left out: their end is not that of the forecast.
        """
        first = (
            select(AttemptRow.job, func.min(AttemptRow.created_at).label("started_at"))
            .group_by(AttemptRow.job)
            .subquery()
        )
        query = (
            select(EventRow.data, JobRow.spec, JobRow.name, JobRow.submitted_at)
            .add_columns(first.c.started_at, JobRow.ended_at)
            .join(JobRow, JobRow.name == EventRow.job)
            .join(first, first.c.job == JobRow.name)
            .where(EventRow.type == _RECORD, JobRow.phase == Phase.COMPLETE.value)
            .where(JobRow.first_attempt == 1, JobRow.ended_at >= EventRow.time)
            .order_by(EventRow.id.desc())
            .limit(most)
        )
        with self._database.read() as session:
            rows = session.execute(query).all()
        return [
            PastForecast(name, spec, StoredForecast(**data), submitted, started, ended)
            for data, spec, name, submitted, started, ended in reversed(rows)
        ]
