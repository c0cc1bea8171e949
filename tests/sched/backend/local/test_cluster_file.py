"""Nodes of this machine that come and go with the lines of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipollux_sched.backend.local.cluster_file import VirtualNodes
from pipollux_sched.backend.local.gpus.state import GpuState
from pipollux_sched.backend.local.hardware import Inventory
from pipollux_sched.spec.job import SpecError


def write(path: Path, *nodes: str) -> None:
    """Write a cluster file as an editor does: another file, renamed."""
    aside = path.with_suffix(".new")
    aside.write_text("nodes:\n" + "".join(f"  - {{{node}}}\n" for node in nodes))
    aside.replace(path)


def test_nodes_are_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cluster.yaml"
    write(path, "name: a, slots: 2, kind: cpu")
    nodes = VirtualNodes(path)
    before = nodes.nodes()
    assert nodes.nodes() is before, "an unchanged file is not read"
    write(path, "name: a, slots: 2, kind: cpu", "name: b, slots: 1, kind: cpu")
    assert {name: node.slots for name, node in nodes.nodes().items()} == {"a": 2, "b": 1}
    assert caplog.messages == []
    path.write_text("nodes: []\n")
    assert list(nodes.nodes()) == ["a", "b"]
    (message,) = caplog.messages
    assert "the nodes stay as they are" in message
    assert "the list is empty" in message
    path.unlink()
    assert list(nodes.nodes()) == ["a", "b"]
    write(path, "name: c, slots: 1, kind: cpu")
    assert list(nodes.nodes()) == ["c"]
    with pytest.raises(SpecError, match="cluster"):
        VirtualNodes(tmp_path / "no-cluster.yaml")


def test_a_table_that_cannot_be_written_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = tuple(GpuState(index=index, uuid=f"GPU-{index}") for index in range(2))
    path, table = tmp_path / "cluster.yaml", tmp_path / "gpus.json"
    write(path, "name: a, slots: 1")
    nodes = VirtualNodes(path, table, lambda: Inventory(gpus))
    table.unlink()
    table.mkdir()
    write(path, "name: a, slots: 2")
    assert nodes.nodes()["a"].slots == 1
    assert "the nodes stay as they are" in caplog.text


def test_gpus_stay_with_their_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may run on them."""
    gpus = tuple(GpuState(index=index, uuid=f"GPU-{index}") for index in range(6))

    def visible(name: str) -> str:
        row = range(nodes.nodes()[name].slots)
        return nodes.devices.of(name, row)["CUDA_VISIBLE_DEVICES"]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = tmp_path / "cluster.yaml"
    write(path, "name: a, slots: 2, kind: gpu", "name: b, slots: 2, kind: gpu")
    nodes = VirtualNodes(path, inventory=lambda: Inventory(gpus))
    write(path, "name: a, slots: 5, kind: gpu", "name: b, slots: 2, kind: gpu")
    assert visible("a") == "GPU-0,GPU-1"
    assert "have 7 slots of kind gpu together, and this machine has 6 GPUs" in caplog.text
    write(path, "name: a, slots: 1, kind: gpu", "name: b, slots: 5, kind: gpu")
    assert visible("b") == "GPU-2,GPU-3"
    assert "would give GPUs of a to others" in caplog.text
    caplog.clear()
    write(path, *(f"name: {name}, slots: 2, kind: gpu" for name in "cba"))
    seen = {name: visible(name) for name in "abc"}
    assert seen == {"a": "GPU-0,GPU-1", "b": "GPU-2,GPU-3", "c": "GPU-4,GPU-5"}
    write(path, "name: a, slots: 3, kind: gpu", "name: b, slots: 2, kind: gpu")
    assert visible("a") == "GPU-0,GPU-1,GPU-4"
    assert caplog.messages == []
