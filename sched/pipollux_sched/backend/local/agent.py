"""torchrun's agent of one replica, with a store that listens only at the address given.

    python -P agent.py OPTIONS -- SCRIPT ARGS...

Run as a file, in a process of the job: it is ``torchrun`` with one more rendezvous backend
(``--rdzv-backend``). torch's own store listens on every interface of the machine, whatever address
it is given, without authentication. Where the rendezvous address is one of the loopback interface,
the store here listens at that address alone; elsewhere it is torch's.
"""

from __future__ import annotations

import ipaddress
import socket
import sys

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in its `__all__`
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import main

BACKEND = "pipollux"
"""Name of the rendezvous backend."""
MEETING_TIMEOUT = 600
"""Seconds that agents wait for each other; torch's own."""


class Rendezvous(StaticTCPRendezvous):
    """torch's static rendezvous; on loopback only this machine can reach its store."""

    def get_backend(self) -> str:
        """Return the name under which it is registered."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other agents; the one of rank 0 hosts the store."""
        if not is_loopback(self.master_addr):
            return super().next_rendezvous()
        serves = self.rank == 0
        store = TCPStore(
            self.master_addr,
            self.master_port,
            self.world_size,
            serves,
            self.timeout,
            master_listen_fd=_listen(self.master_addr, self.master_port) if serves else None,
        )
        # Workers are clients of the agent's store.
        info = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(PrefixStore(self.run_id, store), self.rank, self.world_size, info)


def create_handler(parameters: RendezvousParameters) -> Rendezvous:
    """Return the rendezvous handler for the endpoint that the command line names.

    Args:
        parameters: from the command line; its ``--rdzv-conf`` must give the agent's rank.
    """
    address, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
    return Rendezvous(
        address,
        port,
        rank=int(parameters.config["rank"]),
        world_size=parameters.max_nodes,
        run_id=parameters.run_id,
        timeout=MEETING_TIMEOUT,
    )


def is_loopback(address: str) -> bool:
    """Return whether only processes of the same machine can reach an address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name: what it stands for may change
        return False


def _listen(address: str, port: int) -> int:
    """Return the descriptor of a listening socket; the store closes it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family).detach()


if __name__ == "__main__":
    rendezvous_handler_registry.register(BACKEND, create_handler)
    sys.exit(main())
