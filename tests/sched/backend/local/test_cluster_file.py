"""Nodes of this machine that come and go with the lines of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipollux_sched.backend.local import cluster_file
from pipollux_sched.backend.local.cluster_file import VirtualNodes
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


def test_gpus_stay_with_their_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may run on them."""
    monkeypatch.setattr(cluster_file, "check_gpus", lambda _nodes: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = tmp_path / "cluster.yaml"
    write(path, "name: a, slots: 2, kind: gpu", "name: b, slots: 2, kind: gpu")
    nodes = VirtualNodes(path)
    write(path, "name: a, slots: 4, kind: gpu", "name: b, slots: 2, kind: gpu")
    assert nodes.nodes()["a"].slots == 2
    assert "would give GPUs of b to others" in caplog.text
    write(path, *(f"name: {name}, slots: 2, kind: gpu" for name in "abc"))
    assert nodes.nodes()["a"].slots == 2
    assert nodes.devices.of("c", (0,))["CUDA_VISIBLE_DEVICES"] == "4"
