"""Clusters for tests: the one in memory, and the real one of `pytest --kubernetes`.

A test that takes `cluster` runs on both: with the cluster in memory in every run, and on real
kubelets with `--kubernetes`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.services import require_kubernetes

if TYPE_CHECKING:  # whoever tests something else does not wait for lightkube
    from lightkube import Client

    from .cluster import Cluster
    from .harness.control_plane import ControlPlane
    from .memory.cluster import MemoryCluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the real cluster before the test that asks for it first, of which it is no part."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if parameters.get("cluster") == "kubelets" and isinstance(item, pytest.Function):
            # A list of its own: the one that it has is shared with the test of the other cluster.
            item.fixturenames = ["kubelets", *item.fixturenames]


REAL = pytest.param("kubelets", marks=pytest.mark.kubernetes)
_NUMBERS = itertools.count(1)


@pytest.fixture
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryCluster]:
    """A cluster in memory with two nodes of four GPUs."""
    from .memory.cluster import MemoryCluster

    with MemoryCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        assert isinstance(cluster, MemoryCluster)
        yield cluster


@pytest.fixture(scope="session")
def kubelets() -> Iterator[ControlPlane]:
    """A real cluster with two nodes of four GPUs and two spare hosts, for all tests."""
    require_kubernetes(nodes=True)
    from .harness.control_plane import ControlPlane

    with ControlPlane(nodes=2, spare=2) as cluster:
        assert isinstance(cluster, ControlPlane)
        yield cluster


@pytest.fixture(params=["memory", REAL])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster with two nodes of four GPUs; what a test does to its nodes is undone."""
    cluster = request.getfixturevalue(request.param)
    yield cluster
    if cluster.is_real:
        cluster.restore()


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of the cluster for one test; with it goes what is in it."""
    name = f"test-{next(_NUMBERS)}"
    cluster.create_namespace(name)
    yield name
    if cluster.is_real:
        cluster.delete_namespace(name)


@pytest.fixture
def client(cluster: Cluster, namespace: str) -> Iterator[Client]:
    """A client of the cluster in that namespace."""
    with cluster.client(namespace) as client:
        yield client
