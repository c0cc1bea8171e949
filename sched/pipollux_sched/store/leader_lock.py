"""Leader lock: only one scheduler serves a store, and it cannot write without the lock.

The lock ends with its process: it is on a file beside an SQLite file, or held by a PostgreSQL
session. A session also ends when the server restarts or the network fails, and another scheduler
may then take over. So each scheduler writes a fencing token into the store, and every writing
transaction first checks that the token is unchanged.
"""

from __future__ import annotations

import fcntl
import secrets
from contextlib import ExitStack
from pathlib import Path

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from .errors import StoreTakenError
from .location import Location
from .ownership import open_private
from .tables import MetaRow

_SERVING_LOCK = 0x50697079
"""Number of the advisory lock of the serving scheduler within the database."""

_KEY = "scheduler"


class LeaderLock:
    """The right of one scheduler to serve a store, until `close`; else raises `StoreTakenError`."""

    def __init__(self, engine: Engine, location: Location) -> None:
        self._location = location
        self._token = secrets.token_hex(16)
        self._resources = ExitStack()
        file = location.file
        try:
            held = self._lock_session(engine) if file is None else self._lock_file(file)
        except BaseException:  # including Ctrl-C: release the lock
            self.close()
            raise
        if not held:
            self.close()
            raise StoreTakenError(
                f"another scheduler already serves the store {location}; stop it first, or choose "
                "another with --store or --state-dir"
            )

    def write_token(self, session: Session) -> None:
        """Write this scheduler's fencing token, within a writing transaction."""
        session.merge(MetaRow(key=_KEY, value=self._token))

    def check_token(self, session: Session) -> None:
        """Raise `StoreTakenError` if another scheduler has taken over the store."""
        found = session.scalar(select(MetaRow.value).where(MetaRow.key == _KEY))
        if found != self._token:
            raise StoreTakenError(
                f"another scheduler has taken over the store {self._location}; this one may not "
                "write to it any more, and ends without touching the jobs"
            )

    def close(self) -> None:
        """Release the lock."""
        self._resources.close()

    def _lock_file(self, file: Path) -> bool:
        beside = file.with_name(f"{file.name}.lock")
        handle = self._resources.enter_context(open_private(beside))
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _lock_session(self, engine: Engine) -> bool:
        connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        # Not returned to the pool, which would keep the lock.
        self._resources.callback(connection.close)
        self._resources.callback(connection.invalidate)
        # The server must notice soon when this machine fails.
        connection.exec_driver_sql(
            "SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 10; "
            "SET tcp_keepalives_count = 3"
        )
        locked = connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({_SERVING_LOCK})")
        return bool(locked.scalar())
