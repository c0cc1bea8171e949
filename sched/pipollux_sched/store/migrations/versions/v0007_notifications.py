"""Destinations of notifications, and their outbox."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_MOMENT: sa.Double[float] = sa.Double()


def upgrade() -> None:
    """Create both tables."""
    op.create_table(
        "notify_rules",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("created_at", _MOMENT, nullable=False),
        sa.UniqueConstraint("owner", "name"),
    )
    op.create_table(
        "notifications",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("message", sa.String(), nullable=False, unique=True),
        sa.Column("channel", sa.String(), nullable=False),
        sa.Column("label", sa.String(), nullable=False),
        sa.Column("target", sa.JSON(), nullable=True),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("job", sa.String(), nullable=True),
        sa.Column("items", sa.JSON(), nullable=False),
        sa.Column("num_items", _NUMBER, nullable=False),
        sa.Column("created_at", _MOMENT, nullable=False),
        sa.Column("due_at", _MOMENT, nullable=False),
        sa.Column("attempts", _NUMBER, nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("finished_at", _MOMENT, nullable=True),
        sa.Column("error", sa.String(), nullable=True),
    )
    op.create_index("notifications_by_state", "notifications", ["state", "due_at"])
    op.create_index("notifications_by_channel", "notifications", ["channel", "created_at"])
    op.create_index("notifications_by_job", "notifications", ["job"])
