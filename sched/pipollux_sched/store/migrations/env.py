"""What alembic runs: the revisions, on the connection and in the transaction that it is given."""

from __future__ import annotations

from alembic import context

from pipollux_sched.store.tables import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
with context.begin_transaction():
    context.run_migrations()
