"""Bringing a store of an earlier version up to date, once, when it is opened.

A migration only adds what the earlier version did not know; nothing that it wrote is changed.
"""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.orm import Session

from .tables import SCHEMA_VERSION, MetaRow

_OWN_STAGES = "coalesce(json_extract(jobs.spec, '$.num_stages'), 1)"

_STEPS = {
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
        "ALTER TABLE jobs ADD COLUMN deadline_at FLOAT",
        "ALTER TABLE nodes ADD COLUMN condition VARCHAR NOT NULL DEFAULT 'ready'",
        "ALTER TABLE nodes ADD COLUMN reason VARCHAR NOT NULL DEFAULT ''",
        "ALTER TABLE nodes ADD COLUMN since FLOAT NOT NULL DEFAULT 0",
    ),
}
"""What brings a version to the next one, in SQL."""

OLD_VERSIONS = frozenset(_STEPS)
"""Versions that can be migrated."""


def migrate(session: Session) -> None:
    """Bring the tables to the present version, within a writing transaction."""
    row = session.get(MetaRow, "schema_version", populate_existing=True)
    # Another process may have done it since somebody looked.
    while row is not None and row.value in _STEPS:
        for statement in _STEPS[row.value]:
            session.execute(text(statement))
        row.value = str(int(row.value) + 1)
    session.flush()


assert set(_STEPS) == {str(version) for version in range(1, SCHEMA_VERSION)}  # noqa: S101  # a new version needs its step
