"""The last heartbeat of each replica of a running attempt, kept for the next scheduler.

Whether a replica is lost is decided elsewhere, on the monotonic clock of the scheduler that hears
it. These rows tell the scheduler after that which replicas to expect, and commands without a
scheduler what was heard last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Table, delete, or_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from .database import Database
from .tables import Base, HeartbeatRow, JobRow

__all__ = ["HeartbeatRecords", "KeptHeartbeat", "ReceivedHeartbeat", "drop_heartbeats"]


class ReceivedHeartbeat(NamedTuple):
    """The last heartbeat of a replica, as received."""

    job: str
    attempt: int
    replica: int
    step: int | None = None
    """Optimizer step that it reported; None if it had none."""
    finished: bool = False
    """Whether the replica said that it sends no more of them."""
    seconds: float = 0.0
    """How long ago it was."""


class KeptHeartbeat(NamedTuple):
    """The last heartbeat of a replica, as kept."""

    seconds: float
    """How long ago it was."""
    step: int | None
    """Optimizer step in that heartbeat; None if it had none."""
    finished: bool
    """Whether the replica said that it sends no more of them."""


class HeartbeatRecords:
    """Stores heartbeats, so that they outlive the scheduler that received them.

    Example:
        >>> with Store(Path("/var/lib/pipollux/pipollux.db")) as store:
        ...     store.heartbeats.keep([ReceivedHeartbeat("char-lm", 2, 0, step=7)])

    Args:
        database: database of the store.
        clock: returns the time, in seconds since the epoch.
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def keep(self, received: Sequence[ReceivedHeartbeat]) -> list[None]:
        """Store heartbeats in one transaction; those of attempts that do not run are skipped.

        A replica that has finished stays so, whatever arrives late.

        Returns:
            None for each.
        """
        if not received:
            return []
        with self._database.write(durable=False) as session:
            running = _running_attempts(session, {each.job for each in received})
            now = self._clock()
            rows = [_row(x, now) for x in received if running.get(x.job) == x.attempt]
            if rows:
                session.execute(_UPSERTS[session.get_bind().dialect.name], rows)
        return [None] * len(received)

    def of(self, job: str, attempt: int) -> dict[int, KeptHeartbeat]:
        """Return the last heartbeat of each replica of an attempt that sent one, in order."""
        query = (
            select(HeartbeatRow)
            .where(HeartbeatRow.job == job, HeartbeatRow.attempt == attempt)
            .order_by(HeartbeatRow.replica)
        )
        with self._database.read() as session:
            now = self._clock()
            return {
                row.replica: KeptHeartbeat(max(now - row.time, 0.0), row.step, row.finished)
                for row in session.scalars(query)
            }


def drop_heartbeats(session: Session, job: str, attempt: int) -> None:
    """Delete the heartbeats of a job up to an attempt: it has ended, or a newer one begins."""
    mine = (HeartbeatRow.job == job, HeartbeatRow.attempt <= attempt)
    session.execute(delete(HeartbeatRow).where(*mine))


def _running_attempts(session: Session, names: set[str]) -> dict[str, int]:
    """Return the running attempt of each of these jobs that has one."""
    query = select(JobRow.name, JobRow.attempt, JobRow.running_on)
    rows = session.execute(query.where(JobRow.name.in_(names)))
    return {row.name: row.attempt for row in rows if row.running_on}


def _row(received: ReceivedHeartbeat, now: float) -> dict[str, Any]:
    row = received._asdict()
    row["time"] = now - row.pop("seconds")
    return row


def _upsert(insert: Callable[[Table], Any]) -> Any:
    """Return the statement that inserts a heartbeat, or replaces the replica's one before."""
    statement = insert(_HEARTBEATS)
    new = statement.excluded
    return statement.on_conflict_do_update(
        index_elements=list(_HEARTBEATS.primary_key),
        set_={
            "time": new.time,
            "step": new.step,
            "finished": or_(_HEARTBEATS.c.finished, new.finished),
        },
    )


_HEARTBEATS = Base.metadata.tables[HeartbeatRow.__tablename__]
"""The table, not the class: hundreds of rows are written at once, and none is an object."""
_UPSERTS = {"sqlite": _upsert(sqlite.insert), "postgresql": _upsert(postgresql.insert)}
