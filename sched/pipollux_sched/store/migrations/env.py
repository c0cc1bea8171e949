"""Alembic's environment: runs the revisions on the given connection, in its transaction."""

from __future__ import annotations

from alembic import context

from pipollux_sched.store.tables import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
with context.begin_transaction():
    context.run_migrations()
