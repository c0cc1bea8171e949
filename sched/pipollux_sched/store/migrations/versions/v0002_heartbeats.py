"""The table of heartbeats, and what a backend needs to adopt a generation."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the table `heartbeats`, and `launch` to `generations` in place of `port`."""
    integer = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "heartbeats",
        sa.Column("job", sa.String(), sa.ForeignKey("jobs.name"), primary_key=True),
        sa.Column("generation", integer, primary_key=True, autoincrement=False),
        sa.Column("replica", integer, primary_key=True, autoincrement=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("step", integer, nullable=True),
        sa.Column("finished", sa.Boolean(), nullable=False),
    )
    op.add_column("generations", sa.Column("launch", sa.JSON(), nullable=True))
    op.drop_column("generations", "port")
