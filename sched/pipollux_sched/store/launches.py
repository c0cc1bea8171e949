"""What the next scheduler must know of a generation: how it was started, and where it has saved.

A launch is stored before the first replica is started, so that what runs can be adopted. The step
of an agreed stop comes from the job itself: its processes may be killed between the checkpoint and
their end, and then nothing else tells that it is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from . import journal
from .database import Database
from .errors import StaleGenerationError
from .replicas import check_replica, num_ids
from .tables import GenerationRow

__all__ = ["LaunchRecords"]


class LaunchRecords:
    """Stores launches and agreed stops.

    Example:
        >>> with Store(Path("/var/lib/pipollux/pipollux.db")) as store:
        ...     store.launches.stopped_step("char-lm", 2)
        1200

    Args:
        database: database of the store.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def note_launch(self, job: str, generation: int, data: Mapping[str, Any]) -> None:
        """Store how a generation is started, as JSON; an earlier one is replaced.

        Raises:
            StaleGenerationError: the job has no such generation.
        """
        with self._database.write() as session:
            _find(session, job, generation).launch = dict(data)

    def launch(self, job: str, generation: int) -> dict[str, Any] | None:
        """Return what `note_launch` stored of a generation; None if nothing."""
        with self._database.read() as session:
            return session.scalar(select(GenerationRow.launch).where(*_mine(job, generation)))

    def note_stop(self, job: str, generation: int, step: int) -> None:
        """Store that the replicas of a generation have agreed to stop, and have saved.

        Args:
            job: its name.
            generation: the present one.
            step: the optimizer step of their checkpoint.

        Raises:
            UnknownJobError: there is no job of this name.
            StaleGenerationError: `generation` is not the present one, or has ended.
        """
        with self._database.write() as session:
            row = journal.find_job(session, job)
            check_replica(job, row.generation, num_ids(row), generation)
            _find(session, job, generation).stopped_step = step

    def stopped_step(self, job: str, generation: int) -> int | None:
        """Return the step that `note_stop` stored of a generation; None if none."""
        with self._database.read() as session:
            return session.scalar(select(GenerationRow.stopped_step).where(*_mine(job, generation)))


def _mine(job: str, generation: int) -> tuple[ColumnElement[bool], ...]:
    first = GenerationRow.membership == 1
    return GenerationRow.job == job, GenerationRow.generation == generation, first


def _find(session: Session, job: str, generation: int) -> GenerationRow:
    found = session.scalar(select(GenerationRow).where(*_mine(job, generation)))
    if found is None:
        raise StaleGenerationError(f"job {job!r} has no generation {generation}")
    return found
