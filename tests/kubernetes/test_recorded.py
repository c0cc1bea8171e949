"""The API server in memory answers as the real one did, and the real one still does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services import require_kubernetes

from .conversations.all import CONVERSATIONS, WITH_KUBELETS, hold
from .harness.control_plane import ControlPlane
from .memory.cluster import MemoryCluster
from .record import recorded


@pytest.fixture(scope="module")
def control_plane() -> Iterator[ControlPlane]:
    """A real API server without nodes."""
    require_kubernetes()
    with ControlPlane() as cluster:
        assert isinstance(cluster, ControlPlane)
        yield cluster


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_one_in_memory_answers_as_recorded(name: str, tmp_path: Path) -> None:
    with MemoryCluster(tmp_path / "cluster", nodes=(), kubelets=False) as cluster:
        assert hold(cluster, name) == recorded(name)


@pytest.mark.parametrize("name", WITH_KUBELETS)
def test_kubelets_in_memory_tell_what_was_recorded(name: str, tmp_path: Path) -> None:
    with MemoryCluster(tmp_path / "cluster", nodes=("n1",)) as cluster:
        assert hold(cluster, name) == recorded(name)


@pytest.mark.kubernetes
@pytest.mark.parametrize("name", WITH_KUBELETS)
def test_kubelets_tell_what_was_recorded(name: str, kubelets: ControlPlane) -> None:
    assert hold(kubelets, name) == recorded(name)


@pytest.mark.kubernetes
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_real_one_answers_as_recorded(name: str, control_plane: ControlPlane) -> None:
    assert hold(control_plane, name) == recorded(name)
