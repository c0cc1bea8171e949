"""The tables of the first release; a new store is created with the current tables.

Earlier numbers belonged to schemas that were never released.
"""

from __future__ import annotations

revision = "0004"
down_revision = None


def upgrade() -> None:
    """Leave everything as it is."""
