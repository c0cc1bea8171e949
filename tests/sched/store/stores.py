"""What tests of stores share: a time that they set, and a point of progress."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipollux_sched.spec.cluster import NodeSpec
from pipollux_sched.store import Point, Store

if TYPE_CHECKING:
    from tests.sched.store.postgresql import Server

DATABASES = ["sqlite", "postgresql"]
on_each_database = pytest.mark.parametrize("place", DATABASES, indirect=True)
"""Runs a test, which makes a store in `place`, in each kind of database."""


def make_place(request: pytest.FixtureRequest, folder: Path) -> Path | str:
    """Return where a store may be made, in the kind of database of a fixture."""
    if request.param == "sqlite":
        return folder / "pipollux.db"
    server: Server = request.getfixturevalue("postgresql")
    return server.new_database()


class Clock:
    """A time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def serve_nodes(store: Store, **slots: int) -> None:
    """Let a store know nodes, with so many slots each."""
    nodes = [NodeSpec(name=name, slots=count) for name, count in slots.items()]
    store.set_nodes((n.name, n.slots, n.kind, n.model_dump(mode="json")) for n in nodes)


def point(step: int) -> Point:
    return Point(
        time=1000.0 + step,
        step=step,
        epoch=0,
        samples=8 * step,
        loss=1.5,
        batch_size=8,
        atomic_bsz=8,
        accum_steps=0,
        num_replicas=1,
        step_time=0.1,
        predicted_step_time=None,
        goodput=70.0,
        efficiency=0.9,
        num_epochs=3,
    )
