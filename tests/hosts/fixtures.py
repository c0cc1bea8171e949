"""Hosts in network namespaces, and a real Slurm on them, for the tests of one module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.harness.hosts import Hosts
from tests.hosts.harness.slurm import SlurmCluster
from tests.services import require_slurm


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three hosts that a Slurm can run on."""
    require_slurm()
    with Hosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def slurm(hosts: Hosts) -> Iterator[SlurmCluster]:
    """A Slurm with four GPUs on each of three hosts; a node that is silent for 10 s is down."""
    with SlurmCluster(hosts, node_timeout=10) as made:
        yield made


@pytest.fixture
def slurm_cluster(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """That Slurm with all nodes idle, found by its commands as the scheduler runs them."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    slurm.wait_until(lambda: set(slurm.states().values()) == {"IDLE"})
    return slurm
