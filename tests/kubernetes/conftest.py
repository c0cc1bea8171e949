"""A cluster for each test of Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lightkube import Client

from .cluster import Cluster
from .memory.cluster import MemoryCluster


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[MemoryCluster]:
    """A cluster in memory with two nodes of four GPUs."""
    with MemoryCluster(tmp_path / "cluster") as cluster:
        assert isinstance(cluster, MemoryCluster)
        yield cluster


@pytest.fixture
def client(memory: Cluster) -> Iterator[Client]:
    """A client of the cluster in memory."""
    with memory.client() as client:
        yield client
