"""Gradients with which jobs began."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the column."""
    op.add_column("hints", sa.Column("first_gradients", sa.JSON(), nullable=True))
