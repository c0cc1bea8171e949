"""Replica groups on an engine without a store, with launches in files of the state directory."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipollux_sched.backend import ReplicaGroupManager, ReplicaProgram, Report
from pipollux_sched.backend.base import SlotAssignment
from pipollux_sched.backend.local.engine import LocalEngine
from pipollux_sched.lifecycle import Membership
from pipollux_sched.spec.cluster import ClusterSpec, NodeSpec
from pipollux_sched.store import StateDir


def cpu_nodes(**slots: int) -> list[NodeSpec]:
    """Nodes of CPU slots: `node_a=2` is node-a with two."""
    return [
        NodeSpec(name=name.replace("_", "-"), slots=number, kind="cpu")
        for name, number in slots.items()
    ]


def assignments(nodes: Sequence[str], num_stages: int = 1) -> dict[int, SlotAssignment]:
    """The first slots of a node of its own for each replica."""
    slots = tuple(range(num_stages))
    return {replica: SlotAssignment(node, slots) for replica, node in enumerate(nodes)}


def first_membership(num_replicas: int) -> Membership:
    """Who takes part in an attempt that begins with so many replicas."""
    return Membership(1, tuple(range(num_replicas)), num_replicas, highest=1)


class LaunchFiles:
    """Keeps launches as the store does, for schedulers that come one after the other."""

    def __init__(self, state_dir: StateDir) -> None:
        self._folder = state_dir.path / "launches"
        self.stopped: dict[tuple[str, int], int] = {}

    def note_launch(self, job: str, attempt: int, data: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file(job, attempt).write_text(json.dumps(data))

    def launch(self, job: str, attempt: int) -> dict[str, Any] | None:
        file = self._file(job, attempt)
        found: Mapping[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
        return None if found is None else dict(found)

    def stopped_step(self, job: str, attempt: int) -> int | None:
        return self.stopped.get((job, attempt))

    def _file(self, job: str, attempt: int) -> Path:
        return self._folder / f"{job}-{attempt}.json"


class Prompt(ReplicaGroupManager):
    """Starts what it is told to run at once, not only when it is polled."""

    _kept: tuple[Report, ...] = ()

    def apply(self, program: ReplicaProgram, attempt: int, nodes: Sequence[str]) -> None:
        super().apply(program, attempt, nodes)
        self._kept = (*self._kept, *super().poll())

    def poll(self) -> list[Report]:
        kept, self._kept = self._kept, ()
        return [*kept, *super().poll()]


def local_backend(
    nodes: list[NodeSpec],
    state_dir: StateDir,
    *,
    grace: float = 30.0,
    pass_environment: Collection[str] = (),
) -> ReplicaGroupManager:
    """The backend of this machine."""
    cluster = ClusterSpec(nodes=tuple(nodes))
    engine = LocalEngine(cluster, state_dir, pass_environment=pass_environment)
    return Prompt(engine, LaunchFiles(state_dir), state_dir, grace=grace)
