"""Stores of every version that ever was are brought up to date: once, at one go, or not at all."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, text

from pipollux_sched.lifecycle import Allocate, Cancel
from pipollux_sched.store import NodeCondition, Store, StoreError
from pipollux_sched.store.location import Location
from pipollux_sched.store.schema import REVISION
from pipollux_sched.store.tables import Base
from tests.sched.store.old_stores import make_old_store

VERSIONS = (1, 2, 3)

# Opens a store in children, each killed before a later statement, until one gets through.
KILLED = """
import os, signal, sys
from pathlib import Path
from sqlalchemy import event
from sqlalchemy.engine import Engine
from pipollux_sched.store import Store
import alembic.command  # before the children are made, for each would import it anew

original = Path(sys.argv[1])
killed = 0
while True:
    path = original.with_name(f"{killed}.db")
    path.write_bytes(original.read_bytes())
    child = os.fork()
    if child == 0:
        left = killed
        def count(*_):
            global left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        event.listen(Engine, "before_cursor_execute", count)
        event.listen(Engine, "commit", count)
        Store(path).close()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    killed += 1
    with Store(path) as store:
        print(store.jobs()[0].state.launched, len(store.events()), flush=True)
"""

# Opens the same store as others do, at the same moment.
TOGETHER = """
import sys
from pathlib import Path
from pipollux_sched.store import Store
print("ready", flush=True)
sys.stdin.readline()
with Store(sys.argv[1], create=True) as store:
    print(len(store.jobs()))
"""


def execute(place: Path | str, statement: str) -> None:
    engine = create_engine(Location.of(place).url)
    with engine.begin() as connection:
        connection.execute(text(statement))
    engine.dispose()


def differences(place: Path | str) -> tuple[list[object], str | None]:
    """What is not as this version needs it, and the revision that alembic sees."""
    engine = create_engine(Location.of(place).url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection)
        found = compare_metadata(context, Base.metadata), context.get_current_revision()
    engine.dispose()
    return found


def indexes(path: Path) -> set[tuple[str, str]]:
    with closing(sqlite3.connect(path)) as connection:
        return set(
            connection.execute(
                "SELECT i.name, group_concat(c.name) FROM sqlite_master i, "
                "pragma_index_info(i.name) c WHERE i.sql IS NOT NULL GROUP BY i.name"
            )
        )


def test_a_new_store_is_what_alembic_would_have_made(place: Path | str) -> None:
    Store(place, create=True).close()
    assert differences(place) == ([], REVISION)
    config = Config()
    config.set_main_option("script_location", "pipollux_sched.store:migrations")
    assert ScriptDirectory.from_config(config).get_heads() == [REVISION]


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_store_is_brought_up_to_date(tmp_path: Path, version: int) -> None:
    path = tmp_path / "old.db"
    make_old_store(path, version)
    for _ in range(2):  # the second time there is nothing to do
        with Store(path, clock=lambda: 1010.0) as store:
            assert [store.generations(name)[0].num_stages for name in ("wide", "toy")] == [4, 1]
            assert store.attained_service() == {"wide": 80.0, "toy": 20.0}
            wide = store.job("wide")
            state = wide.state
            assert (state.num_stages, state.launched, state.held) == (None, ("a", "b"), False)
            assert wide.deadline_at == (9000.0 if version == 3 else None)
            assert store.last_points()["toy"].samples == 8
            assert store.hints().keys() == {"wide", "toy"}
            kept = NodeCondition.DRAINING if version == 3 else NodeCondition.READY
            assert store.nodes()["a"].condition is kept
            store.submit("new", {}, "token", 0)
            store.transition("new", Cancel())
    new = tmp_path / "new.db"
    Store(new, create=True).close()
    assert differences(path) == ([], REVISION)
    assert indexes(path) == indexes(new) != set()
    with closing(
        sqlite3.connect(path)
    ) as connection:  # what the old version looks at, to refuse it
        (seen,) = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'")
    assert seen == ("5",)


def test_killed_before_any_statement(tmp_path: Path) -> None:
    """Of a migration: what is left is an old store as it was, and the next one migrates it."""
    make_old_store(tmp_path / "old.db", 1)
    script = [sys.executable, "-c", KILLED, str(tmp_path / "old.db")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 20  # statements, and so many children
    assert set(lines) == {"('a', 'b') 2"}


@pytest.mark.parametrize("old", [False, True])
def test_opened_by_several_at_once(place: Path | str, old: bool) -> None:
    """They neither make the tables twice nor migrate them twice."""
    if old:
        if isinstance(place, str):
            with Store(place, create=True) as store:
                store.submit("toy", {}, "token", 0)
                store.transition("toy", Allocate(["a", "b"], "free"))
            execute(place, "DROP TABLE replicas")
            execute(place, "DROP INDEX events_by_job")
            execute(place, "CREATE INDEX events_by_job ON events (job, type)")
            execute(place, "ALTER TABLE generations DROP COLUMN num_replicas")
            execute(place, "ALTER TABLE jobs DROP COLUMN first_generation")
            execute(place, "UPDATE alembic_version SET version_num = '0003'")
        else:
            make_old_store(place, 1)
    command = [sys.executable, "-c", TOGETHER, str(place)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    openers = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]
    for opener in openers:
        assert opener.stdout is not None
        assert opener.stdout.readline() == "ready\n"
    for opener in openers:
        assert opener.stdin is not None
        opener.stdin.write("\n")
        opener.stdin.flush()
    said = [opener.communicate(timeout=240) for opener in openers]
    jobs = 0 if not old else 1 if isinstance(place, str) else 2
    assert said == [(f"{jobs}\n", "")] * 2
    with Store(place) as store:
        assert sum(seconds > 0 for seconds in store.attained_service().values()) == jobs
    assert differences(place) == ([], REVISION)


def test_a_newer_store_is_refused(place: Path | str, tmp_path: Path) -> None:
    Store(place, create=True).close()
    execute(place, "UPDATE alembic_version SET version_num = '0099'")
    with pytest.raises(StoreError) as refused:
        Store(place)
    assert str(refused.value) == (
        f"{Location.of(place)} was written by a newer version of Pipollux, whose schema is 0099; "
        f"this version knows {REVISION} and older; use that version, or another --state-dir"
    )
    assert differences(place)[1] == "0099"


def test_tables_of_somebody_else_are_left_alone(place: Path | str, tmp_path: Path) -> None:
    if isinstance(place, Path):
        place.touch()
    execute(place, "CREATE TABLE jobs (title VARCHAR)")
    with pytest.raises(StoreError, match=r"cannot be used as a store: .*jobs.* already exists"):
        Store(place, create=True)
    with pytest.raises(StoreError, match="no scheduler has kept a store there yet"):
        Store(place)
