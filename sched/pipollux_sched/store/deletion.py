"""Deletion of an ended job, at its user's request.

It can be interrupted between its steps. First the job is removed, and its pending deletion is
recorded, which keeps its name reserved. Then the caller removes its files. Last its events are
deleted, except for the event of the deletion. The attempts of deleted jobs still count in totals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from pipollux_sched.lifecycle import CANCELLED

from . import journal
from .attempts import AttemptCounts, totals
from .database import Database
from .errors import JobExistsError, JobUnfinishedError
from .notifications import keep_entries
from .records import JobRecord, job_record
from .retention import delete_events
from .tables import (
    AttemptRow,
    EventRow,
    HeartbeatRow,
    HintsRow,
    MetaRow,
    MetricRow,
    ReplicaRow,
    TrialRow,
)

_MARK = "deleting "
"""Prefix of the key of a pending deletion, before the name of the job."""
_COUNTED = "deleted attempts: "
"""Prefix of the keys with the number of attempts of deleted jobs."""
BATCH = 1000
"""Number of events deleted per transaction."""


class PendingDeletion(NamedTuple):
    """A pending deletion of a job."""

    name: str
    event: int


class Deletions:
    """Deletes jobs."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def begin(self, name: str) -> JobRecord:
        """Remove an ended job, and record its deletion; `JobUnfinishedError`: it has not ended."""
        with self._database.write() as session:
            return _begin(session, name, self._clock())

    def pending(self) -> list[PendingDeletion]:
        """Return the pending deletions."""
        query = select(MetaRow).where(MetaRow.key.startswith(_MARK)).order_by(MetaRow.key)
        with self._database.read() as session:
            rows = session.scalars(query)
            return [PendingDeletion(row.key.removeprefix(_MARK), int(row.value)) for row in rows]

    def finish(self, deletion: PendingDeletion) -> None:
        """Delete the events of a job, and complete its deletion."""
        mine = (EventRow.job == deletion.name, EventRow.id < deletion.event)
        query = select(EventRow.id).where(*mine).limit(BATCH)
        while True:
            began = time.monotonic()
            with self._database.write() as session:
                ids = session.scalars(query).all()
                delete_events(session, ids)
                if len(ids) < BATCH:
                    session.execute(delete(MetaRow).where(MetaRow.key == _MARK + deletion.name))
                    return
            # Leaves half of the time to other writers.
            time.sleep(time.monotonic() - began)


def check_free(session: Session, names: Sequence[str]) -> None:
    """Raise `JobExistsError` for the name of a job whose deletion is pending."""
    marks = session.scalars(select(MetaRow.key).where(MetaRow.key.startswith(_MARK)))
    taken = {mark.removeprefix(_MARK) for mark in marks} & set(names)
    if taken:
        raise JobExistsError(
            f"a job named {min(taken)!r} is still being deleted; wait, or give the new one another "
            "name (files that cannot be removed are named in the scheduler's log)"
        )


def counted(session: Session) -> AttemptCounts:
    """Return the counts over the attempts of all deleted jobs."""
    rows = session.scalars(select(MetaRow).where(MetaRow.key.startswith(_COUNTED)))
    found = {row.key.removeprefix(_COUNTED): int(row.value) for row in rows}
    return AttemptCounts(*(found.get(figure, 0) for figure in AttemptCounts._fields))


def _begin(session: Session, name: str, now: float) -> JobRecord:
    row = journal.find_job(session, name)
    job = job_record(row)
    if not job.phase.ended:
        raise JobUnfinishedError(
            f"job {name!r} is {job.phase} and cannot be deleted; cancel it first, with: "
            f"pipollux cancel {name}"
        )
    _count(session, name)
    told = {
        "phase": CANCELLED if job.state.cancelled else job.phase.value,
        "submitted_at": job.submitted_at,
        "ended_at": job.ended_at,
        "num_attempts": job.state.attempt,
    }
    event = journal.log(session, now, "deleted", name, None, told)
    session.flush()  # assigns the id
    session.add(MetaRow(key=_MARK + name, value=str(event.id)))
    for table in (HintsRow, MetricRow, ReplicaRow, HeartbeatRow, AttemptRow):
        session.execute(delete(table).where(table.job == name))
    if job.is_sweep:
        session.execute(delete(TrialRow).where(TrialRow.sweep == name))
    keep_entries(session, name, (), now)
    session.delete(row)
    return job


def _count(session: Session, name: str) -> None:
    before = counted(session)._asdict()
    for figure, value in totals(session, name)._asdict().items():
        session.merge(MetaRow(key=_COUNTED + figure, value=str(before[figure] + value)))
