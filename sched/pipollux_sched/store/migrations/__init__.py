"""Alembic's revisions of the store's tables; `pipollux_sched.store.schema` runs them."""
