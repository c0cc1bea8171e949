"""A server answers however many connections are held open, and holds none when it has stopped."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from pipollux_sched.server.connections import MOST_HEAD, Repeats
from pipollux_sched.server.http_server import HttpServer
from pipollux_sched.server.request_bodies import BodyLimit


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


@contextmanager
def served(head_timeout: float = 600.0, body_timeout: float = 600.0) -> Iterator[HttpServer]:
    """A server that holds at most 20 connections."""
    limited = BodyLimit(app, 1000, body_timeout)
    server = HttpServer(limited, "127.0.0.1", 0, most=20, head_timeout=head_timeout)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def connect(server: HttpServer, first: bytes) -> socket.socket:
    """Connect and send the beginning of a request."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=240)
    connection.sendall(first)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the server ends the connection without an answer; waits for that."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


BEGINNINGS = (
    b"",
    b"GET / HTTP/1.1\r\nX-Half: ",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n12",
)


@pytest.mark.parametrize("beginning", BEGINNINGS, ids=["nothing", "half a head", "half a body"])
def test_half_open_connections_keep_nobody_from_being_answered(
    beginning: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        served() as server,
        ExitStack() as open_ones,
        httpx.Client(trust_env=False, timeout=240) as client,
    ):
        half = [open_ones.enter_context(closing(connect(server, beginning))) for _ in range(60)]
        assert client.get(server.url).status_code == 204
        assert is_closed(half[0]), "the oldest has to go"
        assert len(server._server.server_state.connections) <= 20
        half += [open_ones.enter_context(closing(connect(server, beginning))) for _ in range(60)]
        assert client.get(server.url).status_code == 204
    told = [record for record in caplog.records if "connections at once" in record.getMessage()]
    assert len(told) == 1, "one line a minute"
    assert len(caplog.records) == 1


def test_who_was_answered_has_to_go_last_and_of_those_who_is_quiet_longest() -> None:
    request = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    with served() as server, ExitStack() as open_ones:

        def connected(first: bytes) -> socket.socket:
            return open_ones.enter_context(closing(connect(server, first)))

        def is_answered(connection: socket.socket) -> bool:
            return connection.recv(1000).startswith(b"HTTP/1.1 204 ")

        kept = [connected(request) for _ in range(19)]
        assert all(map(is_answered, kept))
        kept[0].sendall(request)
        assert is_answered(kept[0]), "now the second one is quiet longest"
        silent = connected(b"")
        kept.append(connected(request))
        assert is_closed(silent)
        assert is_answered(kept[-1])
        assert is_answered(connected(request))
        assert is_closed(kept[1])
        kept[0].sendall(request)
        assert is_answered(kept[0])


def test_a_head_or_body_that_takes_too_long() -> None:
    with served(body_timeout=0.2) as server, closing(connect(server, BEGINNINGS[2])) as half:
        answer = b""
        while part := half.recv(1000):
            answer += part
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the body was not complete after 0.2 s" in answer
    with served(head_timeout=0.2) as server:
        for beginning in BEGINNINGS[:2]:
            with closing(connect(server, beginning)) as half:
                assert is_closed(half)
        with closing(connect(server, BEGINNINGS[1])) as trickle:
            trickle.settimeout(0.02)
            with suppress(ConnectionError):
                while True:  # ends, as who sends a little at a time gains no time by it
                    trickle.sendall(b"x")
                    with suppress(TimeoutError):
                        assert trickle.recv(1) == b""
                        break


def test_a_head_that_is_too_large() -> None:
    with served() as server, closing(connect(server, b"GET / HTTP/1.1\r\n")) as endless:
        sent = 0
        with suppress(ConnectionError):
            while True:  # ends, as it is closed
                endless.sendall(b"X-More: " + 1000 * b"x" + b"\r\n")
                sent += 1010
                assert sent < 2**24
        assert sent > MOST_HEAD // 2
        assert httpx.get(server.url, trust_env=False, timeout=240).status_code == 204


def test_a_warning_is_written_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    with served() as server:
        for _ in range(5):
            with closing(connect(server, b"\x00\r\n\r\n")) as wrong:
                assert b"400" in wrong.recv(1000)
    assert [record.getMessage() for record in caplog.records] == ["Invalid HTTP request received."]
    error = logging.LogRecord("uvicorn.error", logging.ERROR, "", 1, "boom", (), None)
    repeats = Repeats()
    assert [repeats.filter(error) for _ in range(3)] == [True] * 3
