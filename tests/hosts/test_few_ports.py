"""Connections with the same port: a replica is not taken for another one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import permutations

import pytest

from tests.hosts.few_ports import REPLICAS
from tests.hosts.harness.hosts import Hosts
from tests.services import require_hosts

PORTS = (40000, 40099)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    require_hosts()
    with Hosts(1) as made:
        yield made


@pytest.mark.exhaustive
def test_each_replica_knows_whose_a_connection_is(hosts: Hosts) -> None:
    """An ephemeral port is free for each other address to connect with, as the kernel counts."""
    hosts.call("n1", "sysctl", "-qw", "net.ipv4.ip_local_port_range={} {}".format(*PORTS))
    replicas = json.loads(hosts.call("n1", sys.executable, "-m", "tests.hosts.few_ports"))
    for one, other in permutations(range(REPLICAS), 2):
        assert replicas[one][str(other)] == replicas[other][str(one)][::-1]
