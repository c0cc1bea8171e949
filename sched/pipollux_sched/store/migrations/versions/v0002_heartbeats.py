"""The table of heartbeats, and what clusters need: launches, agreed stops, interruptions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the table and three columns; what a backend kept in `port` is in `launch`."""
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
    op.add_column("generations", sa.Column("stopped_step", integer, nullable=True))
    op.add_column("jobs", sa.Column("interruptions", integer, nullable=False, server_default="0"))
