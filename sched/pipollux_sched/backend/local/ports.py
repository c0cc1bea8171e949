"""Free ports of the loopback interface."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Collection
from contextlib import suppress

LOOPBACK = "127.0.0.1"
_PORTS = range(20_000, 32_000)


def free_port(promised: Collection[int] = ()) -> int:
    """Return a port of the loopback interface that is free at the moment.

    It lies below the range of ephemeral ports, so that no outgoing connection can use it before
    torchrun listens, and is not one of the `promised`, on which others will listen.
    """
    for _ in range(100):
        port = secrets.choice(_PORTS)
        if port in promised:
            continue
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise OSError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} seems to be free")
