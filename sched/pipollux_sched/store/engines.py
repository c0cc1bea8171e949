"""The supported databases: engines and the start of transactions.

All writing transactions hold the same lock throughout. So data read in a transaction cannot change
before its commit, writers never deadlock, and the ids of events have the order of their commits, so
that a reader of the events after an id misses none.

* SQLite: its write lock (`BEGIN IMMEDIATE`). Write-ahead logging lets other processes read while
  the scheduler writes; with `synchronous=FULL`, commits survive a power cut.
* PostgreSQL: an advisory lock of the transaction. SERIALIZABLE would protect reads too, but needs
  retries after conflicts, and assigns ids in another order than that of commits. The isolation is
  READ COMMITTED, because a snapshot would be taken before the lock is acquired. Reading
  transactions are REPEATABLE READ: a consistent snapshot.
"""

from __future__ import annotations

import json
import sqlite3
import time
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event

from .errors import StoreError
from .location import Location

BUSY_TIMEOUT = 10
"""Timeout in seconds for the lock of another writing process, and for a server's answer."""

_WRITERS_LOCK = 0x50697078
"""Number of the writers' advisory lock within the database."""

_WAITING = {
    "connect_timeout": BUSY_TIMEOUT,
    "keepalives_idle": BUSY_TIMEOUT,
    "keepalives_interval": BUSY_TIMEOUT,
    "keepalives_count": 3,
    "tcp_user_timeout": 3000 * BUSY_TIMEOUT,  # milliseconds
}
"""Timeouts of a PostgreSQL connection, unless set by the URL."""

# NaN is not valid JSON, so readers of events could not parse it.
_to_json = partial(json.dumps, allow_nan=False)


def make_engine(location: Location) -> Engine:
    """Return the engine of a store, or raise `StoreError` if the driver is not installed."""
    return _sqlite(location) if location.file is not None else _postgresql(location)


def reading(engine: Engine) -> Engine:
    """Return an engine on the same connections, for reading transactions."""
    if engine.dialect.name == "sqlite":
        return engine
    return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)


def writing(engine: Engine, *, durable: bool = True) -> Engine:
    """Return an engine for writing; a commit not `durable` may be lost in a power cut only."""
    engine = engine.execution_options(pipollux_write=True, pipollux_durable=durable)
    if engine.dialect.name == "sqlite":
        return engine
    return engine.execution_options(isolation_level="READ COMMITTED")


def _sqlite(location: Location) -> Engine:
    engine = create_engine(
        location.url,
        connect_args={"timeout": BUSY_TIMEOUT},
        json_serializer=_to_json,
        hide_parameters=True,  # the store holds tokens of jobs
        pool_size=4,
        max_overflow=-1,
    )
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: sqlite3.Connection, _record: Any) -> None:
    # Transactions begin in _begin_sqlite, not where sqlite3 would begin them.
    connection.isolation_level = None
    cursor = connection.cursor()
    try:
        _use_wal(cursor)
        for pragma in ("synchronous=FULL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
    finally:
        cursor.close()


def _use_wal(cursor: sqlite3.Cursor) -> None:
    # SQLite does not wait if several processes set this mode on a new file concurrently.
    deadline = time.monotonic() + BUSY_TIMEOUT
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _begin_sqlite(connection: Connection) -> None:
    options = connection.get_execution_options()
    if not options.get("pipollux_write", False):
        connection.exec_driver_sql("BEGIN")
        return
    wait = "FULL" if options["pipollux_durable"] else "NORMAL"
    connection.exec_driver_sql(f"PRAGMA synchronous={wait}")
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _postgresql(location: Location) -> Engine:
    try:
        engine = create_engine(
            location.url,
            connect_args={k: v for k, v in _WAITING.items() if k not in location.url.query},
            json_serializer=_to_json,
            hide_parameters=True,
            pool_size=4,
            max_overflow=-1,
            pool_pre_ping=True,  # after a restart of the server
        )
    except ImportError:
        raise StoreError(
            f"{location} needs a driver that is not installed; "
            "install it with: pip install 'pipollux[postgres]'"
        ) from None
    event.listen(engine, "begin", _begin_postgresql)
    return engine


def _begin_postgresql(connection: Connection) -> None:
    options = connection.get_execution_options()
    if options.get("pipollux_write", False):
        wait = "on" if options["pipollux_durable"] else "off"
        connection.exec_driver_sql(
            f"SET LOCAL lock_timeout = '{BUSY_TIMEOUT}s'; SET LOCAL synchronous_commit = {wait}; "
            f"SELECT pg_advisory_xact_lock({_WRITERS_LOCK})"
        )
