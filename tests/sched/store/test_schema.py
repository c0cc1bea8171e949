"""A store of an earlier version is brought up to date: once, at one go, or not at all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, text

from pipollux_sched.lifecycle import Allocate
from pipollux_sched.store import Store, StoreError, schema
from pipollux_sched.store.location import Location
from pipollux_sched.store.schema import REVISION
from pipollux_sched.store.tables import Base
from tests.programs import Forked
from tests.waiting import until

LATER = """
import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade():
    op.add_column("jobs", sa.Column("colour", sa.String(), nullable=False, server_default="red"))
    op.create_table("labels", sa.Column("job", sa.String(), sa.ForeignKey("jobs.name")))
    op.execute("INSERT INTO labels SELECT name FROM jobs")
    op.drop_index("events_by_job", table_name="events")
    op.create_index("events_by_job", "events", ["job", "id"])
"""
"""The revision of a version that comes after this one."""

# With the folder of revisions as its last argument, a process is of the version after this one.
NEXT_VERSION = """
import sys
from pipollux_sched.store import schema
schema.REVISION = "0009"
schema.REVISIONS += chr(10) + sys.argv[2]
"""

# Opens a store in children, each killed before a later statement, until one gets through.
KILLED = """
import os, signal
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
        print(store.jobs()[0].state.running_on, len(store.events()), flush=True)
"""

# Opens the same store as others do, at the same moment: when there is a file.
TOGETHER = """
import time
from pathlib import Path
from pipollux_sched.store import Store
print("ready", flush=True)
while not Path(sys.argv[3]).exists():
    time.sleep(0.001)
with Store(sys.argv[1], create=True) as store:
    print(len(store.jobs()))
"""


def execute(place: Path | str, statement: str) -> None:
    engine = create_engine(Location.of(place).url)
    with engine.begin() as connection:
        connection.execute(text(statement))
    engine.dispose()


def column(place: Path | str, query: str) -> list[object]:
    """What a query of one column finds."""
    engine = create_engine(Location.of(place).url)
    with engine.begin() as connection:
        found = list(connection.execute(text(query)).scalars())
    engine.dispose()
    return found


def differences(place: Path | str) -> tuple[list[object], str | None]:
    """What is not as this version needs it, and the revision that alembic sees."""
    engine = create_engine(Location.of(place).url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection)
        found = compare_metadata(context, Base.metadata), context.get_current_revision()
    engine.dispose()
    return found


@pytest.fixture
def later(tmp_path: Path) -> str:
    """A folder with the revision of the version that comes after this one."""
    folder = tmp_path / "revisions"
    folder.mkdir()
    (folder / "v0009_colours.py").write_text(LATER)
    return str(folder)


@pytest.fixture
def next_version(later: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let this process be of the version that comes after this one, once it is called."""

    def update() -> None:
        monkeypatch.setattr(schema, "REVISION", "0009")
        monkeypatch.setattr(schema, "REVISIONS", f"{schema.REVISIONS}\n{later}")

    return update


def keep_a_job(place: Path | str) -> None:
    """Make a store of this version with one job, which runs."""
    with Store(place, create=True) as store:
        store.submit("toy", {}, "token", 0)
        store.transition("toy", Allocate(["a", "b"], "free"))


def test_a_new_store_is_what_alembic_would_have_made(place: Path | str) -> None:
    Store(place, create=True).close()
    assert differences(place) == ([], REVISION)
    config = Config()
    config.set_main_option("script_location", "pipollux_sched.store:migrations")
    assert ScriptDirectory.from_config(config).get_heads() == [REVISION]


def test_a_store_of_an_earlier_version_is_brought_up_to_date(
    place: Path | str, next_version: Callable[[], None]
) -> None:
    keep_a_job(place)
    next_version()
    for _ in range(2):  # the second time there is nothing to do
        with Store(place) as store:
            assert store.job("toy").state.running_on == ("a", "b")
            assert [event["type"] for event in store.events()] == ["submitted", "allocated"]
    assert column(place, "SELECT version_num FROM alembic_version") == ["0009"]
    assert column(place, "SELECT colour FROM jobs") == ["red"]
    assert column(place, "SELECT job FROM labels") == ["toy"]


def test_a_store_without_first_gradients_gets_them(place: Path | str) -> None:
    keep_a_job(place)
    execute(place, "ALTER TABLE hints DROP COLUMN first_gradients")
    execute(place, "UPDATE alembic_version SET version_num = '0007'")
    with Store(place) as store:
        store.put_hints("toy", 1, {"gradParams": {"norm": 1.0, "var": 2.0}})
    assert differences(place) == ([], REVISION)


@pytest.mark.exhaustive
def test_killed_before_any_statement(tmp_path: Path, later: str) -> None:
    """Of a migration: what is left is an old store as it was, and the next one migrates it."""
    keep_a_job(tmp_path / "old.db")
    script = [sys.executable, "-c", NEXT_VERSION + KILLED, str(tmp_path / "old.db"), later]
    done = subprocess.run(script, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 10  # statements, and so many children
    assert set(lines) == {"('a', 'b') 2"}


@pytest.mark.parametrize("old", [False, True])
def test_opened_by_several_at_once(
    place: Path | str, old: bool, later: str, tmp_path: Path
) -> None:
    """They neither make the tables twice nor migrate them twice."""
    if old:
        keep_a_job(place)
    script, now = tmp_path / "together.py", tmp_path / "now"
    script.write_text(NEXT_VERSION + TOGETHER)
    with ExitStack() as stack:
        args = [str(place), later, str(now)]
        openers = [stack.enter_context(Forked(script, args)) for _ in range(2)]
        for opener in openers:
            until(lambda opener=opener: opener.output == "ready\n", "it is ready")
        now.touch()
        said = [(opener.wait(), opener.output, opener.errors) for opener in openers]
    assert said == [(0, f"ready\n{int(old)}\n", "")] * 2
    assert column(place, "SELECT version_num FROM alembic_version") == ["0009"]


@pytest.mark.parametrize("version", ["0099", "0003"])
def test_a_store_of_an_unknown_version_is_refused(place: Path | str, version: str) -> None:
    Store(place, create=True).close()
    execute(place, f"UPDATE alembic_version SET version_num = '{version}'")  # noqa: S608  # our own
    with pytest.raises(StoreError) as refused:
        Store(place)
    assert str(refused.value) == (
        f"{Location.of(place)} was written by another version of Pipollux, with schema {version}; "
        f"this version has {REVISION}, and migrates from 0006 on; use the version that wrote "
        "it, or another --state-dir"
    )
    assert differences(place)[1] == version


def test_a_file_that_holds_no_store(tmp_path: Path) -> None:
    path = tmp_path / "pipollux.db"
    with pytest.raises(StoreError, match=r"pipollux\.db does not exist: no scheduler has kept"):
        Store(path)
    path.touch()
    with pytest.raises(StoreError, match=r"pipollux\.db holds no store: no scheduler has kept"):
        Store(path)


def test_tables_of_somebody_else_are_left_alone(place: Path | str, tmp_path: Path) -> None:
    if isinstance(place, Path):
        place.touch()
    execute(place, "CREATE TABLE jobs (title VARCHAR)")
    with pytest.raises(StoreError, match=r"cannot be used as a store: .*jobs.* already exists"):
        Store(place, create=True)
    with pytest.raises(StoreError, match="no scheduler has kept a store there yet"):
        Store(place)
