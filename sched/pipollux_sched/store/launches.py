"""Launches and agreed stops of attempts, stored for the next scheduler.

A launch is stored before the first replica starts, so that running processes can be adopted. The
step of an agreed stop comes from the job itself: its processes may be killed between the checkpoint
and their end, and only this record shows that the checkpoint is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from . import journal
from .database import Database
from .errors import StaleAttemptError
from .replicas import check_replica, num_ids
from .tables import AttemptRow

__all__ = ["LaunchRecords"]


class LaunchRecords:
    """Stores launches and agreed stops.

    Example:
        >>> with Store(Path("/var/lib/pipollux/pipollux.db")) as store:
        ...     store.launches.stopped_step("char-lm", 2)
        1200
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def note_launch(self, job: str, attempt: int, data: Mapping[str, Any]) -> None:
        """Store the launch of an attempt, as JSON, in place of an earlier one."""
        with self._database.write() as session:
            _find(session, job, attempt).launch = dict(data)

    def launch(self, job: str, attempt: int) -> dict[str, Any] | None:
        """Return the stored launch of an attempt; None if there is none."""
        with self._database.read() as session:
            return session.scalar(select(AttemptRow.launch).where(*_mine(job, attempt)))

    def note_stop(self, job: str, attempt: int, step: int) -> None:
        """Store the step at which the replicas of the present attempt have agreed to stop."""
        with self._database.write() as session:
            row = journal.find_job(session, job)
            check_replica(job, row.attempt, num_ids(row), attempt)
            _find(session, job, attempt).stopped_step = step

    def stopped_step(self, job: str, attempt: int) -> int | None:
        """Return the stored step of an agreed stop; None if there is none."""
        with self._database.read() as session:
            return session.scalar(select(AttemptRow.stopped_step).where(*_mine(job, attempt)))


def _mine(job: str, attempt: int) -> tuple[ColumnElement[bool], ...]:
    first = AttemptRow.membership == 1
    return AttemptRow.job == job, AttemptRow.attempt == attempt, first


def _find(session: Session, job: str, attempt: int) -> AttemptRow:
    found = session.scalar(select(AttemptRow).where(*_mine(job, attempt)))
    if found is None:
        raise StaleAttemptError(f"job {job!r} has no attempt {attempt}")
    return found
