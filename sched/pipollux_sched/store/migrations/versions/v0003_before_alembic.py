"""The tables as they were when alembic was taken up: where older stores are brought to first.

A new store is made with all tables of the present version, so nothing is to be done here.
"""

from __future__ import annotations

revision = "0003"
down_revision = None


def upgrade() -> None:
    """Leave everything as it is."""
