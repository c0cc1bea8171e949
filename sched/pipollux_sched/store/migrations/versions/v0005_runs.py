"""What a store needs of jobs that are run again from the start, after they have ended.

* `jobs.first_generation`, the launch that the present run of a job begins with;
* `meta.schema_version` is what versions before alembic look at: they refuse this store by it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the column: so far, every job has been run once."""
    integer = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    column = sa.Column("first_generation", integer, nullable=False, server_default="1")
    op.add_column("jobs", column)
    op.execute("UPDATE meta SET value = '5' WHERE key = 'schema_version'")
