"""An ASGI application served by a thread of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import uvicorn
from starlette.types import ASGIApp

from pipollux_sched.errors import SchedulerError

START_TIMEOUT = 10.0
STOP_TIMEOUT = 5.0


class HttpServerError(SchedulerError):
    """The server cannot listen; the text is one sentence for the user."""


class HttpServer:
    """Serves an application over HTTP until it is stopped.

    Args:
        app: what is served.
        host: address to listen on.
        port: port to listen on; 0 for any that is free.
        preferred: which of the free ones, if it is free; 0: any.

    Raises:
        HttpServerError: the address cannot be listened on.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, preferred: int = 0) -> None:
        self._socket = _listen_preferably(host, preferred) if not port else _listen(host, port)
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=2,
        )
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._run, name="pipollux-http", daemon=True)

    @property
    def url(self) -> str:
        """Where the server listens."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def start(self) -> None:
        """Begin to serve; return when requests are answered."""
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self.stop()
                raise HttpServerError(f"the server at {self.url} did not start")
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop serving: requests under way are finished, or dropped after a few seconds."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT)
        self._server.force_exit = True
        self._socket.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Leave no connection open; one that was accepted at the last moment would be."""
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
        await asyncio.sleep(0)  # the loop closes them at its next turn, which is its last


def _listen_preferably(host: str, port: int) -> socket.socket:
    try:
        return _listen(host, port)
    except HttpServerError:
        return _listen(host, 0)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named asyncio sets TCP_NODELAY, without which an answer may take 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise HttpServerError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --port, or 0 for "
            "any that is free"
        ) from error
    return listener
