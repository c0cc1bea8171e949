"""The nodes that a scheduler serves, and their conditions, within a session of the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from . import journal
from .errors import UnknownNodeError
from .records import NodeCondition, NodeRecord, node_record
from .tables import NodeRow


def remember(
    session: Session, nodes: Iterable[tuple[str, int, str, Mapping[str, Any]]], now: float
) -> None:
    """Replace the nodes by the current ones; known nodes keep their condition."""
    before = {row.name: row for row in session.scalars(select(NodeRow))}
    for name, slots, kind, spec in nodes:
        row = before.pop(name, None)
        if row is None:
            row = NodeRow(name=name, condition="ready", reason="", since=now)
            session.add(row)
        row.slots, row.kind, row.spec = slots, kind, dict(spec)
    for row in before.values():
        session.delete(row)


def set_condition(
    session: Session, name: str, condition: NodeCondition, reason: str, now: float
) -> NodeRecord:
    """Set the condition of a node, or raise `UnknownNodeError`, and log a change."""
    row = session.get(NodeRow, name)
    if row is None:
        known = ", ".join(session.scalars(select(NodeRow.name).order_by(NodeRow.name)))
        raise UnknownNodeError(f"no node is named {name!r}; there are {known}")
    if row.condition != condition.value:
        row.since = now
        data = {"node": name, "condition": condition.value, "reason": reason}
        journal.log(session, now, "node", None, None, data)
    row.condition, row.reason = condition.value, reason
    return node_record(row)


def all_nodes(session: Session) -> dict[str, NodeRecord]:
    """Return the nodes by name."""
    rows = session.scalars(select(NodeRow).order_by(NodeRow.name))
    return {row.name: node_record(row) for row in rows}
