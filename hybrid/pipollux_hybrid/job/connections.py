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

__all__ = ["Address", "Ends", "ends_of", "new_connections", "open_connections", "opposite"]

Address = tuple[str, int]
"""Of one end of a connection: IP address and port."""
Ends = tuple[Address, Address]
"""Of a connection: that of the process which asks, and that of the other one.

Both are needed to know a connection: two processes of a host may have the same port, where what
they are connected with differs.
"""


def open_connections() -> dict[str, socket.socket]:
    """Return this process's TCP connections by the kernel's names of them: copies, to be closed."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            if not os.readlink(entry).startswith("socket:"):
                continue
            copy = os.dup(int(entry.name))
            try:
                connection = socket.socket(fileno=copy)
            except OSError:  # the number has become that of a file
                os.close(copy)
                continue
            # The copy's, as the number may also have become another connection's.
            name = f"socket:[{os.fstat(copy).st_ino}]"
            if name not in found and _is_connected(connection):
                found[name] = connection
            else:
                connection.close()
    return found


def ends_of(connection: socket.socket) -> Ends:
    """Return where a connection begins and ends.

    Raises:
        OSError: It is none any more.
    """
    return _address(connection.getsockname()), _address(connection.getpeername())


def opposite(ends: Ends) -> Ends:
    """Return a connection's ends as the other process has them."""
    here, there = ends
    return there, here


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


def _address(name: tuple[str, int]) -> Address:
    """Return an end of a connection; what IPv6 makes of an IPv4 address is that address."""
    host, port = name[:2]
    return host.removeprefix("::ffff:"), port


def _is_connected(connection: socket.socket) -> bool:
    try:
        protocol = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL)
        return protocol == socket.IPPROTO_TCP and bool(connection.getpeername())
    except OSError:  # it has been closed by its other end
        return False
