"""Schema of a store, migrated when the store is opened.

A new store gets all tables at once; an earlier version goes through alembic's revisions in
`migrations/`. Either is one writing transaction, so it happens once, completely or not at all.
"""

from __future__ import annotations

import time

from sqlalchemy import Column, Connection, MetaData, String, Table, insert, inspect, select

from .errors import StoreError
from .location import Location
from .tables import Base, MetaRow

REVISION = "0008"
"""The newest of alembic's revisions, required by this version."""
REVISIONS = "pipollux_sched.store.migrations:versions"
"""Location of the revisions, in alembic's format."""

_VERSION = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))
"""Alembic's table with the revision of a store."""


def no_store(location: Location) -> StoreError:
    """Return the error for a location without a store."""
    is_missing = location.file is not None and not location.file.exists()
    return StoreError(
        f"{location} {'does not exist' if is_missing else 'holds no store'}: no scheduler has "
        "kept a store there yet; check --state-dir, or start one with: "
        "pipollux serve"
    )


def revision(connection: Connection) -> str | None:
    """Return the revision of a store; None: there is no store."""
    if not inspect(connection).has_table(_VERSION.name):
        return None
    found: str | None = connection.scalar(select(_VERSION.c.version_num))
    return found


def bring_up_to_date(connection: Connection, location: Location) -> None:
    """Create the tables, or migrate them, within a writing transaction.

    `StoreError`: the tables have a schema that this version does not know.
    """
    found = revision(connection)  # again: another process may have migrated the store meanwhile
    if found is None:
        _create(connection)
    elif found != REVISION:
        _upgrade(connection, found, location)


def _create(connection: Connection) -> None:
    # Another program's tables of the same names must not be mistaken for a store.
    Base.metadata.create_all(connection, checkfirst=False)
    connection.execute(insert(MetaRow).values(key="created_at", value=str(time.time())))
    _VERSION.create(connection)
    connection.execute(insert(_VERSION).values(version_num=REVISION))


def _upgrade(connection: Connection, found: str, location: Location) -> None:
    from alembic import command  # slow to import, and rarely needed
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", "pipollux_sched.store:migrations")
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", REVISIONS)
    config.attributes["connection"] = connection
    known = {entry.revision for entry in ScriptDirectory.from_config(config).walk_revisions()}
    if found not in known:
        raise StoreError(
            f"{location} was written by another version of Pipollux, with schema {found}; this "
            f"version has {REVISION}, and migrates from {min(known)} on; use the version that "
            "wrote it, or another --state-dir"
        )
    command.upgrade(config, REVISION)
