"""The open TCP connections of this process, from the kernel.

The communication libraries do not list their connections. But they open them when a group is
created, so comparing the open connections before and after identifies them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Address = tuple[str, int]
"""IP address and port of one end of a connection."""
Ends = tuple[Address, Address]
"""The local and the remote end of a connection. Both are needed to identify it: two processes of a
host may use the same local port for connections to different peers."""


def open_connections() -> dict[str, socket.socket]:
    """Return duplicates of this process's TCP sockets by kernel name; the caller closes them."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            copy = os.dup(int(number))
            try:
                connection = socket.socket(fileno=copy)
            except OSError:  # the descriptor was reused for a file
                os.close(copy)
                continue
            # Of the duplicate, as the descriptor may have been reused for another connection.
            name = f"socket:[{os.fstat(copy).st_ino}]"
            if name not in found and _is_connected(connection):
                found[name] = connection
            else:
                connection.close()
    return found


def ends_of(connection: socket.socket) -> Ends:
    """Return the local and the remote end of a connection; an OSError if it is closed."""
    return _address(connection.getsockname()), _address(connection.getpeername())


def opposite(ends: Ends) -> Ends:
    """Return a connection's ends as seen by the other process."""
    here, there = ends
    return there, here


@contextmanager
def new_connections() -> Iterator[set[str]]:
    """Yield a set that is filled at the end with the names of the connections opened in the body,
    also by other threads. It is empty on systems other than Linux.
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


def _address(name: tuple[str, int]) -> Address:
    """Return one end of a connection; IPv4-mapped IPv6 addresses become IPv4."""
    host, port = name[:2]
    return host.removeprefix("::ffff:"), port


def _is_connected(connection: socket.socket) -> bool:
    try:
        protocol = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL)
        return protocol == socket.IPPROTO_TCP and bool(connection.getpeername())
    except OSError:  # closed by the peer
        return False
