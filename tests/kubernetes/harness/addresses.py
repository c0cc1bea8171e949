"""Where the servers of a control plane listen."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from tests.programs import free_port

LOOPBACK = "127.0.0.1"
_PORTED = ("etcd", "peer", "api", "extensions", "manager", "scheduler")


@dataclass(frozen=True)
class Addresses:
    """Where the servers of a control plane listen."""

    machine: str
    """Of all but the API server."""
    api: str
    """Of the API server, as containers know it, too."""
    services: str
    """The range of addresses that services have."""
    ports: Mapping[str, int]
    """By server."""

    @property
    def url(self) -> str:
        """URL of the API server."""
        return f"https://{self.api}:{self.ports['api']}"

    @property
    def etcd(self) -> str:
        """URL of etcd."""
        return f"http://{self.machine}:{self.ports['etcd']}"

    @property
    def peer(self) -> str:
        """URL at which etcd would meet others."""
        return f"http://{self.machine}:{self.ports['peer']}"


def on_loopback() -> Addresses:
    """Return addresses that nothing but this machine reaches, at ports that are free."""
    ports = {name: free_port() for name in _PORTED}
    return Addresses(LOOPBACK, LOOPBACK, "10.96.0.0/24", ports)


def beside_hosts(gateway: str) -> Addresses:
    """Return addresses that the network of the hosts reaches.

    Containers reach the API server at the first address of services, which this machine gets.

    Args:
        gateway: address of this machine in that network.
    """
    services = _services(gateway)
    first = services.replace(".0/24", ".1")
    subprocess.run(["ip", "address", "add", f"{first}/32", "dev", _device(gateway)], check=True)
    ports = dict(zip(_PORTED, (2379, 2380, 443, 8443, 10257, 10259), strict=True))
    return Addresses(gateway, first, services, ports)


def _services(gateway: str) -> str:
    """Return the addresses of services beside those of a network of hosts."""
    first, second, third, _ = gateway.split(".")
    return f"{first}.{int(second) + 10}.{third}.0/24"


def _device(address: str) -> str:
    """Return the network device that has an address."""
    found = subprocess.run(
        ["ip", "-oneline", "address", "show", "to", f"{address}/32"],
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.split()[1]
