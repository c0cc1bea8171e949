"""Nodes for replicas from the tables of a Ray cluster, their names, and what starts no client."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipollux_sched.backend.base import BackendError
from pipollux_sched.backend.ray.connection import Actor, RayNode, Snapshot, _sentence
from pipollux_sched.backend.ray.engine import RayOptions
from pipollux_sched.backend.ray.nodes import SETTLE_TIME, NodeTable
from pipollux_sched.backend.registry import EngineOptions, make_engine
from pipollux_sched.store import StateDir
from tests.sched.store.stores import Clock

A, B, C = ("a" * 56, "b" * 56, "c" * 56)


def ray_node(
    name: str = "192.0.2.7",
    host: str = "GPU_Box.example.com",
    free: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
    *,
    draining: bool = False,
    **total: float,
) -> RayNode:
    return RayNode(name, host, total, total if free is None else free, labels or {}, draining)


class Tables:
    """What a client has seen, one snapshot after the other."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self.clock = Clock()
        self._table = NodeTable(names or {}, self.clock)

    def look(
        self,
        nodes: Mapping[str, RayNode],
        actors: Mapping[str, Actor] | None = None,
        broken: Mapping[str, str] | None = None,
    ) -> Mapping[str, Any]:
        snapshot = Snapshot(nodes=nodes, actors=actors or {})
        return self._table.look(snapshot, dict.fromkeys(nodes, "") | (broken or {}))


def test_gpus_are_slots_else_cpus() -> None:
    """A node without devices is none; labels give the type of its GPUs, and spot nodes."""
    labels = {"ray.io/accelerator-type": "A100", "ray.io/market-type": "spot"}
    found = Tables().look(
        {
            A: ray_node(GPU=4.0, CPU=32.0, memory=2.0**36, labels=labels),
            B: ray_node("worker-1", CPU=7.5),
            C: ray_node("head", memory=2.0**30),
        }
    )
    assert list(found) == ["gpu-box", "worker-1"]
    gpus, cpus = found["gpu-box"].spec, found["worker-1"].spec
    assert (gpus.slots, gpus.kind, gpus.cpus, gpus.memory) == (4, "gpu", 32, 2**36)
    assert (gpus.gpu_type, gpus.preemptible) == ("A100", True)
    assert (cpus.slots, cpus.kind, cpus.cpus, cpus.memory) == (7, "cpu", None, None)
    assert (cpus.gpu_type, cpus.preemptible) == (None, False)


def test_resources_of_others_are_not_offered() -> None:
    """They count once they have been held for a while, and are free again at once."""
    tables = Tables()
    groups = {"toy.a1.r0": Actor(node=A, bundle={"GPU": 1.0, "CPU": 2.0})}

    def seen(gpus: float, cpus: float) -> tuple[int, int | None, str]:
        free = {"GPU": gpus, "CPU": cpus}
        node = tables.look({A: ray_node(GPU=4.0, CPU=8.0, free=free)}, groups)["gpu-box"]
        return node.slots, node.spec.cpus, node.reason

    assert seen(3.0, 6.0) == (4, 8, "")
    assert seen(1.5, 3.0) == (4, 8, ""), "our group may not be in the other table yet"
    tables.clock.now += SETTLE_TIME + 0.1
    taken = (2, 5, "other work of the Ray cluster holds 2 of 4 GPUs")
    assert seen(1.5, 3.0) == taken, "a part of a GPU is of no use"
    assert seen(4.0, 8.0) == (4, 8, ""), "the tables disagree while our group is removed"
    tables.clock.now += SETTLE_TIME + 0.1
    assert seen(1.5, 3.0) == taken


def test_a_node_that_drains_or_does_not_see_the_folder() -> None:
    nodes = {A: ray_node("a", CPU=1.0, draining=True), B: ray_node("b", CPU=1.0)}
    found = Tables().look(nodes, broken={B: "node b does not see /home/ada"})
    assert (found["a"].ready, found["a"].draining, found["a"].reason) == (
        True,
        True,
        "Ray drains it",
    )
    assert not found["b"].ready
    assert found["b"].reason == "node b does not see /home/ada"


def test_names_stay_with_their_nodes() -> None:
    """Two raylets of one host differ in name; one that comes back is the same node again."""
    tables = Tables({B: "gpu-box"})
    node = ray_node(CPU=1.0)
    assert list(tables.look({A: node, B: node})) == ["gpu-box", "gpu-box-aaaaaa"]
    assert list(tables.look({A: node})) == ["gpu-box-aaaaaa"]
    assert list(tables.look({A: node, C: node})) == ["gpu-box", "gpu-box-aaaaaa"]


def test_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ray" else find(name)
    )
    with pytest.raises(BackendError, match=r"pip install 'pipollux\[ray\]'"):
        make_engine("ray", EngineOptions(state_dir=StateDir(tmp_path)))


def test_the_client_server_is_no_address(tmp_path: Path) -> None:
    own = RayOptions(address="ray://head:10001")
    with pytest.raises(BackendError, match="must run on a node of the Ray cluster"):
        make_engine("ray", EngineOptions(state_dir=StateDir(tmp_path), own=own))


def test_errors_of_the_client_are_sentences() -> None:
    """Ray's own texts have many lines."""
    mismatch = (
        "RuntimeError: Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n"
        "    Python: 3.12.1\nThis process on Ray Client was started with:\n    Ray: 2.50.0\n"
        "    Python: 3.11.7\n"
    )
    assert _sentence(mismatch) == (
        "it runs Ray: 2.60.0, Python: 3.12.1, and this scheduler Ray: 2.50.0, Python: 3.11.7; "
        "install the cluster's versions of both for the scheduler"
    )
    assert _sentence("ConnectionError: no GCS\nTry ray start") == "ConnectionError: no GCS"
