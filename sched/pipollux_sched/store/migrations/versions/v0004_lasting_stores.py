"""What a store needs that is kept for months, and in other databases than SQLite.

* `generations.num_replicas`, so that slots are counted without reading JSON in SQL;
* the index of events by job holds their ids, as one that is not SQLite's would not;
* `replicas`, where replicas say under which address the others reach them;
* `meta.schema_version` is what versions before alembic look at: they refuse this store by it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the column, make the index anew."""
    integer = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    column = sa.Column("num_replicas", integer, nullable=False, server_default="0")
    op.add_column("generations", column)
    _count_replicas(op.get_bind())
    op.create_table(
        "replicas",
        sa.Column("job", sa.String(), sa.ForeignKey("jobs.name"), primary_key=True),
        sa.Column("generation", integer, primary_key=True),
        sa.Column("replica", integer, primary_key=True),
        sa.Column("address", sa.String(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
    )
    op.drop_index("events_by_job", table_name="events")
    op.create_index("events_by_job", "events", ["job", "type", "id"])
    op.execute("UPDATE meta SET value = '4' WHERE key = 'schema_version'")


def _count_replicas(connection: sa.Connection) -> None:
    table = sa.table(
        "generations",
        sa.column("id", sa.BigInteger()),
        sa.column("nodes", sa.JSON()),
        sa.column("num_replicas", sa.BigInteger()),
    )
    for row in connection.execute(sa.select(table.c.id, table.c.nodes)).all():
        counted = table.update().where(table.c.id == row.id).values(num_replicas=len(row.nodes))
        connection.execute(counted)
