"""An ASGI application served by a thread of this process."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from pipollux_sched.controller.event_loop_monitor import TICK
from pipollux_sched.errors import SchedulerError
from pipollux_sched.utils.vital_thread import VitalThread

from .connections import HEAD_TIMEOUT, BoundedConfig, Repeats, most_connections
from .tls import Tls

START_TIMEOUT = 10.0
STOP_TIMEOUT = 5.0
QUEUED = 1024
"""Length of the kernel's queue of connections to accept."""


class HttpServerError(SchedulerError):
    """The server cannot listen; the text is one sentence for the user."""


class HttpServer:
    """Serves an application over HTTP until it is stopped.

    Args:
        port: port to listen on; 0: any free port.
        preferred: port to prefer for 0 if it is free; 0: any.
        most: limit on concurrent connections; None: derived from the process's descriptors.
        head_timeout: seconds that the head of a request may take.
        tick: called every second by the serving thread, or later if the thread is busy.

    Raises:
        HttpServerError: the address is not available.
        TlsError: the certificate cannot be used.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        preferred: int = 0,
        *,
        tls: Tls | None = None,
        most: int | None = None,
        head_timeout: float = HEAD_TIMEOUT,
        tick: Callable[[], object] = lambda: None,
    ) -> None:
        if tls is not None:
            tls.check()
        self._socket = _listen_preferably(host, preferred) if not port else _listen(host, port)
        config = BoundedConfig(
            app,
            most=most_connections() if most is None else most,
            head_timeout=head_timeout,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=2,
            ssl_certfile=None if tls is None else tls.certificate,
            ssl_keyfile=None if tls is None else tls.key,
        )
        self._server = _Server(config, tick)
        self._repeats = Repeats()
        self.thread = VitalThread("http", self._run)
        """Runs while requests are answered."""

    @property
    def url(self) -> str:
        """URL of the server at its listening address."""
        host, port = self._socket.getsockname()[:2]
        scheme = "https" if self._server.config.ssl_certfile else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def port(self) -> int:
        """The listening port."""
        port: int = self._socket.getsockname()[1]
        return port

    def start(self) -> None:
        """Start serving; return once requests are answered."""
        self.thread.start()
        deadline = time.monotonic() + START_TIMEOUT
        while not self._server.started:
            if not self.thread.is_alive() or time.monotonic() > deadline:
                self.stop()
                raise HttpServerError(f"the server at {self.url} did not start")
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop serving: requests in progress are finished, or dropped after a few seconds."""
        self._server.should_exit = True
        if self.thread.is_alive():
            self.thread.join(STOP_TIMEOUT)
        self._server.force_exit = True
        self._socket.close()

    def _run(self) -> None:
        logger = logging.getLogger("uvicorn.error")
        logger.addFilter(self._repeats)  # one line a minute about malformed requests
        try:
            self._server.run(sockets=[self._socket])
        finally:
            logger.removeFilter(self._repeats)


class _Server(uvicorn.Server):
    config: BoundedConfig

    def __init__(self, config: BoundedConfig, tick: Callable[[], object]) -> None:
        super().__init__(config)
        self._tick = tick

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Log failures to accept a connection without a traceback each."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._note_failure)
        if self.config.is_ssl:
            # A TLS handshake has the time limit of a request's head; asyncio's own is a minute.
            limit = {"ssl_handshake_timeout": self.config.head_timeout}
            loop.create_server = partial(loop.create_server, **limit)  # type: ignore[method-assign]  # uvicorn has no setting for it
        await super().startup(sockets)
        self._beat(loop)
        # asyncio also uses the number of accepts per loop iteration as the length of this queue.
        for listener in sockets or ():
            listener.listen(QUEUED)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._tick()
        loop.call_later(TICK, self._beat, loop)

    def _note_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if str(context.get("message", "")).startswith("socket.accept()"):
            self.config.exhausted.note()
        else:
            loop.default_exception_handler(context)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections, including one accepted in the last loop iteration."""
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
        await asyncio.sleep(0)  # the loop closes them in its next and last iteration


def _listen_preferably(host: str, port: int) -> socket.socket:
    try:
        return _listen(host, port)
    except HttpServerError:
        return _listen(host, 0)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With an explicit protocol asyncio sets TCP_NODELAY; without it, answers may take 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise HttpServerError(
            f"cannot listen on {host}:{port} ({error.strerror}); {_advice(error)}"
        ) from error
    return listener


def _advice(error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return "choose as --host an address of this machine, or 0.0.0.0 for all of them"
    return "choose another --port, or 0 for any that is free"
