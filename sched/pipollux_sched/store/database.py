"""The database under the store: transactions, and notification of waiters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import event, func, select
from sqlalchemy.exc import DatabaseError, InterfaceError, OperationalError
from sqlalchemy.orm import Session

from . import schema
from .engines import make_engine, reading, writing
from .errors import StoreError, StoreUnavailableError
from .leader_lock import LeaderLock
from .location import Location
from .records import JobRecord, job_record
from .tables import JobRow

_CHANGED_JOBS = "changed jobs"


class _Writing(Session):
    """A session that records the jobs whose rows it changes in its `info`; None: deleted."""


@event.listens_for(_Writing, "after_flush")
def _note_changed_jobs(session: Session, _context: Any) -> None:
    noted: dict[str, JobRow | None] = session.info.setdefault(_CHANGED_JOBS, {})
    noted |= {row.name: row for row in (*session.new, *session.dirty) if isinstance(row, JobRow)}
    noted |= {row.name: None for row in session.deleted if isinstance(row, JobRow)}


def _changed_jobs(session: Session) -> dict[str, JobRecord | None]:
    """Return the jobs that a transaction about to be committed has changed; None: deleted."""
    session.flush()
    noted: dict[str, JobRow | None] = session.info.get(_CHANGED_JOBS, {})
    return {name: None if row is None else job_record(row) for name, row in noted.items()}


class Database:
    """The database of a store, opened for one process; safe for use by many threads.

    Args:
        where: path of an SQLite file, whose directory must exist, or the URL of a database.
        create: create the file and its tables if they are missing.

    Raises:
        StoreError: there is no store, or this version cannot read it.
    """

    def __init__(self, where: Path | str, *, create: bool) -> None:
        self._location = Location.of(where)
        file = self._location.file
        if file is not None and not create and not file.is_file():
            raise schema.no_store(self._location)
        self._engine = make_engine(self._location)
        self._reader, self._writer = reading(self._engine), writing(self._engine)
        self._hasty_writer = writing(self._engine, durable=False)
        self._lock = threading.RLock()
        self._changed = threading.Condition()
        self._version = 0
        self._closed = False
        self._leader_lock: LeaderLock | None = None
        self.on_jobs_changed: Callable[[Mapping[str, JobRecord | None]], object] = lambda _: None
        """Called with the jobs whose rows a transaction of this object has changed, after its
        commit and before the next transaction. None: deleted, or its new state is unknown."""
        try:
            self._open(create)
        except BaseException as error:  # including Ctrl-C: close everything
            self._engine.dispose()
            if isinstance(error, DatabaseError | OSError | StoreUnavailableError):
                raise StoreError(
                    f"{self._location} cannot be used as a store: {_reason(error)}"
                ) from error
            raise

    @property
    def location(self) -> Location:
        """Location of the store."""
        return self._location

    def acquire_leader_lock(self) -> None:
        """Become the only scheduler that serves the store, or raise `StoreTakenError`."""
        with self._available():
            lock = LeaderLock(self._engine, self._location)
        try:
            with self.write() as session:
                lock.write_token(session)
        except BaseException:  # including Ctrl-C: release the lock
            lock.close()
            raise
        self._leader_lock = lock

    def check_leader_lock(self) -> None:
        """Raise `StoreTakenError` if the leader lock was acquired, but is no longer held."""
        if self._leader_lock is not None:
            with self.read() as session:
                self._leader_lock.check_token(session)

    def close(self) -> None:
        """Close all connections; later transactions are refused."""
        with self._lock:
            self._closed = True
        if self._leader_lock is not None:
            self._leader_lock.close()
        self._engine.dispose()

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Session]:
        """Run a writing transaction: committed at the end, rolled back on an error.

        If it is not `durable`, the commit does not wait for the disk.

        Raises:
            StoreTakenError: another scheduler has taken over the store.
            StoreUnavailableError: the database is unavailable; if the connection broke during the
                commit, it is unknown whether the transaction was committed.
        """
        self._check_open()
        writer = self._writer if durable else self._hasty_writer
        changed: dict[str, JobRecord | None] = {}
        with self._available(), self._lock:
            try:
                with _Writing(writer) as session, session.begin():
                    if self._leader_lock is not None:
                        self._leader_lock.check_token(session)
                    yield session
                    changed = _changed_jobs(session)
            except BaseException:  # a failed commit may have taken effect
                self.on_jobs_changed(dict.fromkeys(changed))
                raise
            self.on_jobs_changed(changed)
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Run a reading transaction on a consistent snapshot; raise `StoreUnavailableError`."""
        self._check_open()
        with self._available(), Session(self._reader) as session, session.begin():
            yield session

    def num_bytes(self) -> int:
        """Return the size of the database, in bytes."""
        file = self._location.file
        if file is not None:
            files = (file, file.with_name(f"{file.name}-wal"))
            return sum(path.stat().st_size for path in files if path.exists())
        with self.read() as session:
            return session.scalar(select(func.pg_database_size(func.current_database()))) or 0

    @property
    def version(self) -> int:
        """Number of commits by this object; for `wait`."""
        return self._version

    def wait(self, version: int, timeout: float) -> int:
        """Wait up to `timeout` seconds for a commit after `version`; return the new version."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, timeout)
            return self._version

    @contextmanager
    def _available(self) -> Iterator[None]:
        try:
            yield
        except (OperationalError, InterfaceError) as error:
            raise StoreUnavailableError(
                f"the store {self._location} cannot be used now: {_reason(error)}"
            ) from error

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self._location} has been closed")

    def _open(self, create: bool) -> None:
        file = self._location.file
        if create and file is not None:
            file.touch(mode=0o600)  # before it holds any data: it will hold tokens of jobs
            file.chmod(0o600)
        with self.read() as session:
            found = schema.revision(session.connection())
        if found == schema.REVISION:
            return
        if found is None and not create:
            raise schema.no_store(self._location)
        with self.write() as session:
            schema.bring_up_to_date(session.connection(), self._location)


def _reason(error: Exception) -> str:
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    said = str(error).strip()
    return said.splitlines()[0].rstrip(".: ") if said else type(error).__name__
