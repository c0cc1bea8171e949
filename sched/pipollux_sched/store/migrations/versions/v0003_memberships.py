"""Memberships: replicas that join and leave while the others train."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_INTEGER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_UNIQUE = ("job", "generation", "membership")


def upgrade() -> None:
    """Add the state of live changes to jobs, and several memberships to a generation."""
    op.add_column("jobs", sa.Column("live", sa.JSON(), nullable=True))
    connection = op.get_bind()
    if connection.dialect.name == "sqlite":
        _copy_generations()  # it changes no constraint of a table that is there
        return
    for column in _new_columns():
        op.add_column("generations", column)
    for constraint in sa.inspect(connection).get_unique_constraints("generations"):
        op.drop_constraint(str(constraint["name"]), "generations")
    op.create_unique_constraint(None, "generations", list(_UNIQUE))


def _copy_generations() -> None:
    kept = _kept_columns()
    names = ", ".join(column.name for column in kept)
    op.rename_table("generations", "generations_0002")
    op.create_table("generations", *kept, *_new_columns(), sa.UniqueConstraint(*_UNIQUE))
    op.execute(f"INSERT INTO generations ({names}) SELECT {names} FROM generations_0002")  # noqa: S608  # our own names
    op.drop_table("generations_0002")


def _new_columns() -> tuple[sa.Column[Any], ...]:
    return (
        sa.Column("membership", _INTEGER, nullable=False, server_default="1"),
        sa.Column("pause_seconds", sa.Double(), nullable=True),
    )


def _kept_columns() -> tuple[sa.Column[Any], ...]:
    times = ("created_at", "started_at", "first_step_at", "stopping_at", "ended_at")
    return (
        sa.Column("id", _INTEGER, primary_key=True),
        sa.Column("job", sa.String(), sa.ForeignKey("jobs.name"), nullable=False),
        sa.Column("generation", _INTEGER, nullable=False),
        sa.Column("nodes", sa.JSON(), nullable=False),
        sa.Column("num_replicas", _INTEGER, nullable=False),
        sa.Column("num_stages", _INTEGER, nullable=False),
        *(sa.Column(name, sa.Double(), nullable=name != "created_at") for name in times),
        sa.Column("first_step", _INTEGER, nullable=True),
        sa.Column("restart_seconds", sa.Double(), nullable=True),
        sa.Column("outcome", sa.String(), nullable=True),
        sa.Column("intent", sa.String(), nullable=True),
        sa.Column("launch", sa.JSON(), nullable=True),
        sa.Column("stopped_step", _INTEGER, nullable=True),
    )
