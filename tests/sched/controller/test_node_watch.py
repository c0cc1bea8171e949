"""Nodes of a cluster as they come and go, in the store; and the jobs that they take with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipollux_sched.backend import ReplicaGroupManager, ReplicaProgram
from pipollux_sched.controller.node_watch import NodeWatch
from pipollux_sched.lifecycle import Event, NodeLost
from pipollux_sched.store import NodeCondition, StateDir, Store
from tests.sched.backend.cluster import NODES, Cluster
from tests.sched.backends import LaunchFiles


class Watched:
    """A watch of a cluster in memory."""

    def __init__(self, folder: Path) -> None:
        state_dir = StateDir(folder)
        self.cluster = Cluster()
        self.backend = ReplicaGroupManager(self.cluster, LaunchFiles(state_dir), state_dir)
        self.store = Store(folder / "pipollux.db", create=True)
        self.told: list[tuple[str, Event]] = []
        self.reconsidered = 0
        self.watch = NodeWatch(
            self.store,
            self.backend,
            lambda job, event: self.told.append((job, event)),
            settings={},
            reconsider=self._note,
        )

    def _note(self) -> None:
        self.reconsidered += 1

    def lose(self, name: str) -> None:
        """Let a node be down, and the backend know."""
        self.cluster.nodes_now = {**NODES, name: replace(NODES[name], ready=False, reason="gone")}
        self.backend._cluster._looked_at = -10.0
        self.backend.poll()

    def start(self, job: str, node: str) -> None:
        self.backend.apply(ReplicaProgram(job=job, script=None), 1, [node])
        self.backend.poll()


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    tmp_path.joinpath("state").mkdir()
    return Watched(tmp_path / "state")


def test_a_job_leaves_a_lost_node_once(watched: Watched) -> None:
    watched.start("one", "a")
    watched.start("two", "b")
    watched.watch.look()
    assert watched.told == []
    watched.lose("a")
    watched.watch.look()
    watched.watch.look()
    lost = NodeLost(1, "Node a does not answer, or is no longer in the cluster.", "a")
    assert watched.told == [("one", lost)]
    assert watched.store.nodes()["a"].condition is NodeCondition.DEAD
    assert watched.reconsidered == 2


def test_a_job_that_is_started_on_a_node_just_lost(watched: Watched) -> None:
    """It was decided on before; nothing else happens to the nodes."""
    watched.watch.look()
    watched.lose("a")
    watched.watch.look()
    watched.start("late", "a")
    watched.watch.look()
    assert [job for job, _ in watched.told] == ["late"]
