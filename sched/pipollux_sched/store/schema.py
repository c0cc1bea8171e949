"""Bringing the tables of a store to what this version of Pipollux needs, when it is opened.

A new store gets all tables at once. One of an earlier version goes through alembic's revisions in
`migrations/`, after it has been brought to the first of them where it is from before alembic. All
of it is one writing transaction: done once, whoever else opens the store, or not at all.
"""

from __future__ import annotations

import time

from sqlalchemy import Column, Connection, MetaData, String, Table, insert, inspect, select, text

from .errors import StoreError
from .location import Location
from .tables import Base, MetaRow

REVISION = "0005"
"""The newest of alembic's revisions, which this version needs."""

_BASELINE = "0003"
"""The revision of a store as the last version before alembic wrote it."""

_VERSION = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))
"""Where alembic keeps the revision of a store."""

_OWN_STAGES = "coalesce(json_extract(jobs.spec, '$.num_stages'), 1)"

# Only SQLite was there then, so this is its SQL.
_BEFORE_ALEMBIC = {
    # Jobs may be launched with another number of stages than they were submitted with.
    "1": (
        "ALTER TABLE jobs ADD COLUMN num_stages INTEGER",
        "ALTER TABLE jobs ADD COLUMN launched_stages INTEGER",
        "ALTER TABLE generations ADD COLUMN num_stages INTEGER NOT NULL DEFAULT 1",
        f"UPDATE generations SET num_stages = (SELECT {_OWN_STAGES} FROM jobs"  # noqa: S608  # ours
        " WHERE jobs.name = generations.job)",
    ),
    # Jobs can be suspended by their users and have deadlines; nodes can be drained and be dead.
    "2": (
        "ALTER TABLE jobs ADD COLUMN held BOOLEAN NOT NULL DEFAULT 0",
        "ALTER TABLE jobs ADD COLUMN deadline_at DOUBLE",
        "ALTER TABLE nodes ADD COLUMN condition VARCHAR NOT NULL DEFAULT 'ready'",
        "ALTER TABLE nodes ADD COLUMN reason VARCHAR NOT NULL DEFAULT ''",
        "ALTER TABLE nodes ADD COLUMN since DOUBLE NOT NULL DEFAULT 0",
    ),
    "3": (),
}
"""What brings a version before alembic to the next one."""


def no_store(location: Location) -> StoreError:
    """Return the error for a place where nobody has kept a store yet."""
    return StoreError(
        f"{location} {'does not exist' if location.file else 'holds no store'}: no scheduler has "
        "kept a store there yet; check --state-dir, or start one with: "
        "pipollux serve"
    )


def revision(connection: Connection) -> str | None:
    """Return the revision of a store, "1" to "3" where alembic was not known; None: no store."""
    tables = inspect(connection)
    if tables.has_table(_VERSION.name):
        found: str | None = connection.scalar(select(_VERSION.c.version_num))
        return found
    if tables.has_table(MetaRow.__tablename__):
        return connection.scalar(select(MetaRow.value).where(MetaRow.key == "schema_version"))
    return None


def bring_up_to_date(connection: Connection, location: Location) -> None:
    """Make the tables, or migrate them, within a writing transaction.

    Raises:
        StoreError: a newer version of Pipollux has written them.
    """
    found = revision(connection)  # again: another process may have done it since somebody looked
    if found == REVISION:
        return
    if found is None:
        _create(connection)
        return
    if found in _BEFORE_ALEMBIC:
        for version in range(int(found), len(_BEFORE_ALEMBIC) + 1):
            for statement in _BEFORE_ALEMBIC[str(version)]:
                connection.execute(text(statement))
        _stamp(connection, _BASELINE)
    _upgrade(connection, found, location)


def _create(connection: Connection) -> None:
    # Tables of the same names that somebody else made are not to be taken for ours.
    Base.metadata.create_all(connection, checkfirst=False)
    facts = {"schema_version": str(int(REVISION)), "created_at": str(time.time())}
    rows = [{"key": key, "value": value} for key, value in facts.items()]
    connection.execute(insert(MetaRow), rows)
    _stamp(connection, REVISION)


def _stamp(connection: Connection, number: str) -> None:
    _VERSION.create(connection)
    connection.execute(insert(_VERSION).values(version_num=number))


def _upgrade(connection: Connection, found: str, location: Location) -> None:
    from alembic import command  # slow to import, and seldom needed
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", "pipollux_sched.store:migrations")
    config.attributes["connection"] = connection
    known = {entry.revision for entry in ScriptDirectory.from_config(config).walk_revisions()}
    if found not in known | _BEFORE_ALEMBIC.keys():
        raise StoreError(
            f"{location} was written by a newer version of Pipollux, whose schema is {found}; this "
            f"version knows {REVISION} and older; use that version, or another --state-dir"
        )
    command.upgrade(config, REVISION)
