"""The SQLite file under the store: how it is opened, and how transactions begin and end.

* Write-ahead logging, so that other processes read while the scheduler writes, and
  `synchronous=FULL`, so that what was committed survives a power cut.
* A writing transaction takes SQLite's write lock when it begins. What it has read cannot change
  before it commits, and two writers never deadlock over an upgrade.
* Within this process writers queue for a lock, and whoever waits for news is woken by a commit.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import Session

from pipollux_sched.errors import SchedulerError

from .migration import OLD_VERSIONS, migrate
from .tables import SCHEMA_VERSION, Base, MetaRow

BUSY_TIMEOUT = 10.0
"""Seconds to wait for another process that writes."""


class StoreError(SchedulerError):
    """The store cannot do what was asked; the text is one sentence for the user."""


class UnknownJobError(StoreError):
    """No job has this name."""


class UnknownNodeError(StoreError):
    """No node has this name."""


class ConflictError(StoreError):
    """What was asked does not fit the present state of a job."""


class JobExistsError(ConflictError):
    """A job of this name is already there."""


class StaleGenerationError(ConflictError):
    """Whoever reports belongs to a generation that is no longer the present one."""


class Database:
    """One SQLite file, opened for one process; safe for use by many threads.

    Args:
        path: the file; its directory must exist.
        create: make the file and its tables when they are not there.

    Raises:
        StoreError: there is no store at `path`, or it is not one that this version understands.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        if not create and not path.is_file():
            raise StoreError(
                f"{path} does not exist: no scheduler has kept a store there yet; "
                "check --state-dir, or start one with: pipollux serve --cluster FILE"
            )
        self._path = path
        self._engine = _engine(path)
        self._lock = threading.RLock()
        self._news = threading.Condition()
        self._version = 0
        self._closed = False
        try:
            self._open(create)
        except (DatabaseError, StoreError) as error:
            self._engine.dispose()
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"{path} cannot be used as a store: {error.__cause__ or error}"
            ) from error

    def close(self) -> None:
        """Close every connection; from then on every transaction is refused."""
        with self._lock:
            self._closed = True
        self._engine.dispose()

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Run a writing transaction: committed at the end, rolled back when an error leaves it."""
        engine = self._engine.execution_options(pipollux_write=True)
        self._check_open()
        with self._lock, Session(engine) as session, session.begin():
            yield session
        with self._news:
            self._version += 1
            self._news.notify_all()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Run a reading transaction, which sees one moment of the store."""
        self._check_open()
        with Session(self._engine) as session, session.begin():
            yield session

    @property
    def version(self) -> int:
        """Number of commits by this object so far; for `wait`."""
        return self._version

    def wait(self, version: int, timeout: float) -> int:
        """Wait until something was committed after `version`, or `timeout` seconds have passed.

        Returns:
            The version to wait for next.
        """
        with self._news:
            self._news.wait_for(lambda: self._version != version, timeout)
            return self._version

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self._path} has been closed")

    def _open(self, create: bool) -> None:
        if create:
            with self.write() as session:
                Base.metadata.create_all(session.connection())
                if session.get(MetaRow, "schema_version") is None:
                    session.add(MetaRow(key="schema_version", value=str(SCHEMA_VERSION)))
                    session.add(MetaRow(key="created_at", value=str(time.time())))
        if self._schema_version() in OLD_VERSIONS:
            with self.write() as session:
                migrate(session)
        found = self._schema_version()
        if found != str(SCHEMA_VERSION):
            raise StoreError(
                f"{self._path} has schema version {found}, this version of Pipollux needs "
                f"{SCHEMA_VERSION}; use another --state-dir or the version that wrote it"
            )
        with suppress(OSError):
            self._path.chmod(0o600)  # it holds the tokens of the jobs

    def _schema_version(self) -> str:
        with self.read() as session:
            row = session.get(MetaRow, "schema_version")
            return row.value if row else "none"


def _engine(path: Path) -> Engine:
    engine = create_engine(
        URL.create("sqlite+pysqlite", database=str(path)),
        connect_args={"timeout": BUSY_TIMEOUT},
        # Not a number is not JSON, and whoever reads the events could not be sent it.
        json_serializer=partial(json.dumps, allow_nan=False),
        pool_size=4,
        max_overflow=-1,
    )
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    return engine


def _configure(connection: sqlite3.Connection, _record: Any) -> None:
    connection.isolation_level = (
        None  # transactions begin where _begin says, not where sqlite3 thinks
    )
    cursor = connection.cursor()
    try:
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
    finally:
        cursor.close()


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("pipollux_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
