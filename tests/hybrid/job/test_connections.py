"""What tells two connections of a host apart."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from pipollux_hybrid.job.connections import ends_of, open_connections, opposite


def test_connections_with_the_same_port_are_told_apart_by_both_ends() -> None:
    """As the kernel gives ephemeral ports: again where what they are connected with differs."""
    with ExitStack() as stack:

        def opened(connection: socket.socket) -> socket.socket:
            return stack.enter_context(connection)

        servers = [opened(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        clients = [opened(socket.socket()) for _ in servers]
        port = 0
        for client, server in zip(clients, servers, strict=True):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            client.bind(("127.0.0.1", port))
            port = client.getsockname()[1]
            client.connect(server.getsockname())
        accepted = [opened(server.accept()[0]) for server in servers]
        assert ends_of(clients[0])[0] == ends_of(clients[1])[0]
        assert [opposite(ends_of(x)) for x in accepted] == [*map(ends_of, clients)]
        assert ends_of(clients[0]) != ends_of(clients[1])
        copies = [opened(x) for x in open_connections().values()]
        assert {*map(ends_of, copies)} >= {*map(ends_of, [*clients, *accepted])}
