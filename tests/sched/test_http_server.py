"""A server that has stopped holds no connection, however late that was made."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from pipollux_sched.http_server import HttpServer


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_connections_that_are_accepted_while_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once such a one stayed open, and whoever was at its other end waited for an answer."""
    server = HttpServer(app, "127.0.0.1", 0)
    server.start()
    host, port = server.url.removeprefix("http://").split(":")
    late: list[socket.socket] = []
    shut_down = uvicorn.Server.shutdown

    async def accept_one_more(self: uvicorn.Server, sockets: list[socket.socket] | None) -> None:
        before = set(self.server_state.connections)
        late.append(socket.create_connection((host, int(port)), timeout=240))
        loop_turns = 0
        while not self.server_state.connections - before:
            await asyncio.sleep(0.001)
            loop_turns += 1
            assert loop_turns < 10_000
        told = set(self.server_state.connections)
        self.server_state.connections.clear()  # those that are told to end: none of these
        await shut_down(self, sockets)
        self.server_state.connections.update(told)

    monkeypatch.setattr(uvicorn.Server, "shutdown", accept_one_more)
    server.stop()
    with late[0] as connection, suppress(ConnectionResetError):
        assert connection.recv(1) == b""
