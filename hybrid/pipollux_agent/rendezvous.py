"""The rendezvous of the agents of one attempt.

The store of the agents listens at one address: that of the command line, or the one that replica 0
has registered with the scheduler.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in its `__all__`
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from pipollux_protocol import environment as variables

from . import address_exchange

BACKEND = "pipollux"
"""Name of the rendezvous backend."""
RENDEZVOUS_TIMEOUT = 600
"""Seconds that agents wait for each other; torch's default."""


class Rendezvous(StaticTCPRendezvous):
    """torch's static rendezvous, whose address may only become known at run time."""

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other agents; the one of rank 0 hosts the store."""
        serves = self.rank == 0
        address, port = self.master_addr, self.master_port
        if variables.ELASTIC.read(os.environ):
            # The script needs its address again at each elastic resize.
            with suppress(OSError):  # without the scheduler nobody joins
                own = address_exchange.own_address()
                os.environ.update(variables.ADDRESS.write(own))
                address_exchange.use_interface_of(own)
        listener: socket.socket | None = None
        if port == 0 and self.world_size > 1:
            own = address_exchange.own_address()
            address_exchange.use_interface_of(own)
            listener = address_exchange.listen(own, 0) if serves else None
            announced = listener.getsockname()[1] if listener else 0
            address, port = address_exchange.meet(self.rank, own, announced, RENDEZVOUS_TIMEOUT)
        elif not is_address(address):
            return super().next_rendezvous()
        elif serves:
            listener = address_exchange.listen(address, port)
        store = TCPStore(
            address,
            listener.getsockname()[1] if listener else port,
            self.world_size,
            serves,
            self.timeout,
            master_listen_fd=listener.detach() if listener else None,
        )
        # Workers are clients of the agent's store.
        info = RendezvousStoreInfo(address, store.port)
        return RendezvousInfo(PrefixStore(self.run_id, store), self.rank, self.world_size, info)


def create_handler(parameters: RendezvousParameters) -> Rendezvous:
    """Return the handler for a command line, whose ``--rdzv-conf`` has the agent's rank."""
    address, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
    return Rendezvous(
        "127.0.0.1" if port == 0 else address,
        port,
        rank=int(parameters.config["rank"]),
        world_size=parameters.max_nodes,
        run_id=parameters.run_id,
        timeout=RENDEZVOUS_TIMEOUT,
    )


def is_address(text: str) -> bool:
    """Return whether this is an IP address; a name may resolve to several, and these may change."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
