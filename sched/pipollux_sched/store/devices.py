"""The latest state of the devices of slots, as one document."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import select

from .database import Database
from .tables import MetaRow

_LATEST = "devices"
FRESH = 120.0
"""Seconds after which the use of a device is not shown any more: no scheduler writes it."""
_USE = ("utilization", "memory_used", "memory_total", "job")


class DeviceRecords:
    """The devices of a store."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def latest(self) -> dict[str, list[dict[str, Any]]]:
        """Return the devices by node; old ones without their use."""
        with self._database.read() as session:
            text = session.scalar(select(MetaRow.value).where(MetaRow.key == _LATEST))
        found: dict[str, Any] = {"time": 0.0, "nodes": {}} if text is None else json.loads(text)
        nodes: dict[str, list[dict[str, Any]]] = found["nodes"]
        if self._clock() > found["time"] + FRESH:
            unknown = dict.fromkeys(_USE)
            nodes = {name: [{**one, **unknown} for one in row] for name, row in nodes.items()}
        return nodes

    def keep(self, nodes: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Replace the devices of all nodes."""
        text = json.dumps({"time": self._clock(), "nodes": nodes})
        with self._database.write(durable=False) as session:
            session.merge(MetaRow(key=_LATEST, value=text))
