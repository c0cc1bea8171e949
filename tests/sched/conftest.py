"""State directories that nothing is left of, and places where a store can be kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipollux_sched.backend.replica import command
from pipollux_sched.store import StateDir, Store
from tests.extent import first
from tests.sched.processes import processes_of
from tests.sched.scripts import LIGHT_AGENT
from tests.sched.store.postgresql import Server, why_not
from tests.sched.store.stores import DATABASES, Clock, make_place
from tests.services import service_missing


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Server]:
    """A server that is started when first asked for, and ended with the last test."""
    reason = why_not()
    if reason is not None:
        service_missing(f"no PostgreSQL server can be started: {reason}")
    server = Server()
    yield server
    server.remove()


@pytest.fixture
def light_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that a scheduler of this process starts need no torch of their own."""
    monkeypatch.setattr(command, "_AGENT", LIGHT_AGENT)


@pytest.fixture(params=first(1, DATABASES))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Where a store may be made: in each kind of database, usually in SQLite.

    Tests of the store itself run in each in every run, and so do those `on_each_database`.
    """
    return make_place(request, tmp_path)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(place: Path | str, clock: Clock) -> Iterator[Store]:
    """A new store in each kind of database, whose time stands still until it is moved."""
    with Store(place, create=True, clock=clock) as store:
        yield store


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[StateDir]:
    """A new state directory; a process that is left of it fails the test."""
    directory = StateDir(tmp_path / "state")
    directory.create()
    yield directory
    assert processes_of(directory.path) == []
