"""The last heartbeat of each replica of a running attempt, stored for the next scheduler.

The scheduler that receives heartbeats decides by its monotonic clock whether a replica is lost. The
rows show the next one which replicas to expect, and commands the last heartbeats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Table, delete, or_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from .database import Database
from .tables import Base, HeartbeatRow, JobRow


class ReceivedHeartbeat(NamedTuple):
    """The last heartbeat of a replica, as received."""

    job: str
    attempt: int
    replica: int
    step: int | None = None
    """Optimizer step of the heartbeat; None: not reported."""
    finished: bool = False
    """Whether it was the replica's last heartbeat."""
    seconds: float = 0.0


class KeptHeartbeat(NamedTuple):
    """The last heartbeat of a replica, `seconds` ago."""

    seconds: float
    step: int | None
    finished: bool = False


class HeartbeatRecords:
    """Stores heartbeats, so that they survive the scheduler that received them.

    Example:
        >>> with Store(Path("/var/lib/pipollux/pipollux.db")) as store:
        ...     store.heartbeats.keep([ReceivedHeartbeat("char-lm", 2, 0, step=7)])
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def keep(self, received: Sequence[ReceivedHeartbeat]) -> list[None]:
        """Store heartbeats of running attempts; a finished replica stays finished."""
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
        """Return the last heartbeat of each replica of an attempt, by replica."""
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
    """Delete the heartbeats of a job up to an attempt that has ended or been replaced."""
    mine = (HeartbeatRow.job == job, HeartbeatRow.attempt <= attempt)
    session.execute(delete(HeartbeatRow).where(*mine))


def _running_attempts(session: Session, names: set[str]) -> dict[str, int]:
    query = select(JobRow.name, JobRow.attempt, JobRow.running_on)
    rows = session.execute(query.where(JobRow.name.in_(names)))
    return {row.name: row.attempt for row in rows if row.running_on}


def _row(received: ReceivedHeartbeat, now: float) -> dict[str, Any]:
    row = received._asdict()
    row["time"] = now - row.pop("seconds")
    return row


def _upsert(insert: Callable[[Table], Any]) -> Any:
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
"""The table instead of the class: hundreds of rows are written at once, without objects."""
_UPSERTS = {"sqlite": _upsert(sqlite.insert), "postgresql": _upsert(postgresql.insert)}
