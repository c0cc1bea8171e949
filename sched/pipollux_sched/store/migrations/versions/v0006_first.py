"""The first release's tables, created with the store; earlier numbers were never released."""

from __future__ import annotations

revision = "0006"
down_revision = None


def upgrade() -> None:
    """Leave everything as it is."""
