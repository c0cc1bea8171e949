"""Places where a store can be kept: a file, and a database of a PostgreSQL server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sched.postgresql import Server, why_not


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Server]:
    """A server that is started when first asked for, and ended with the last test."""
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no PostgreSQL server can be started: {reason}")
    server = Server()
    yield server
    server.remove()


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Where a store may be made: the test is run for each kind of database."""
    if request.param == "sqlite":
        return tmp_path / "pipollux.db"
    server: Server = request.getfixturevalue("postgresql")
    return server.new_database()
