"""A Ray cluster that the tests of a session share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .cluster import RayCluster


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """A Ray of two nodes, n1 and n2, of four CPUs each; n1 is the head."""
    with RayCluster("n1", num_cpus=4) as cluster:
        cluster.call("add", "n2", num_cpus=4)
        yield cluster
