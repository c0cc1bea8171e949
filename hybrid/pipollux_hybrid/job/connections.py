"""The TCP connections of this process, as the kernel knows them.

The libraries that carry messages do not tell which connections they have. But they open them when a
group is made, so whoever looks before and after knows.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["Address", "address_of", "new_connections", "open_connections"]

Address = tuple[str, int]
"""Of one end of a connection: IP address and port."""


def open_connections() -> dict[str, socket.socket]:
    """Return this process's TCP connections by the kernel's names of them: copies, to be closed."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile, or is no connection
            name = os.readlink(entry)
            if not name.startswith("socket:") or name in found:
                continue
            connection = socket.socket(fileno=os.dup(int(entry.name)))
            try:
                is_tcp = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL)
                if is_tcp == socket.IPPROTO_TCP and connection.getpeername():
                    found[name] = connection
            finally:
                if name not in found:
                    connection.close()
    return found


def address_of(name: tuple[str, int]) -> Address:
    """Return an end of a connection; what IPv6 makes of an IPv4 address is that address."""
    host, port = name[:2]
    return host.removeprefix("::ffff:"), port


@contextmanager
def new_connections() -> Iterator[set[str]]:
    """Have a set filled, at the end, with the names of the connections that were opened within.

    Those that another thread opens meanwhile are among them. Elsewhere than on Linux it is empty.
    """
    found: set[str] = set()
    before = _names()
    yield found
    found |= _names() - before


def _names() -> set[str]:
    if not Path("/proc/self/fd").is_dir():
        return set()
    connections = open_connections()
    for connection in connections.values():
        connection.close()
    return set(connections)
