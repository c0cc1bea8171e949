"""Conditions in the status of objects."""

from __future__ import annotations

from .answers import Object
from .store import now


def set_condition(thing: Object, kind: str, status: str, **more: str | None) -> None:
    """Set a condition of an object; the time is that of its last change."""
    conditions = thing.setdefault("status", {}).setdefault("conditions", [])
    found = next((c for c in conditions if c["type"] == kind), None)
    if found is None:
        found = {"type": kind, "status": "", "lastProbeTime": None}
        conditions.append(found)
    if found["status"] != status:
        found |= {"status": status, "lastTransitionTime": now()}
    for key in ("reason", "message"):
        found.pop(key, None)
        if more.get(key):
            found[key] = more[key]
