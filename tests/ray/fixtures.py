"""A Ray cluster that the tests of a session share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .cluster import RayCluster


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """A Ray of two nodes, n1 and n2, of four CPUs each."""
    with RayCluster() as cluster:
        for name in ("n1", "n2"):
            cluster.call("add", name, num_cpus=4)
        yield cluster
