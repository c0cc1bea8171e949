"""The tables of the first version: `tables.py` as it was then.

A new store is created with the tables of the present version, so there is nothing to do here.
"""

from __future__ import annotations

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Leave everything as it is."""
