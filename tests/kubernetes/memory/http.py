"""The HTTP face of the API server in memory: connections, answers, streams."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from . import answers
from .answers import ApiError, Object
from .failures import CUT, DROP, LOSE, Failure, Failures
from .registry import Registry
from .requests import Answer, LogStream, Request, Watch, answer
from .store import Change

LOOK = 0.2
"""Seconds after which a stream without news looks whether it is still wanted."""
Logs = Callable[[LogStream, Callable[[], bool]], Iterator[bytes]]


class Server(ThreadingHTTPServer):
    """The listening part; `Front` starts a new one each time that the API server comes back."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], front: Front) -> None:
        self.front = front
        self.connections: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  # the base class's
        """Keep what went wrong here; that a client has gone is no error."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.front.errors.append(traceback.format_exc())


class Front:
    """The API server as its clients see it: an address that answers, or does not.

    Args:
        registry: what it serves.
        logs: returns what a container prints, given what tells whether it is still wanted.
    """

    def __init__(self, registry: Registry, logs: Logs) -> None:
        self.registry = registry
        self.logs = logs
        self.failures = Failures()
        self.requests: Counter[tuple[str, str]] = Counter()
        """How many requests there were, by verb ("watch" and "list" apart) and kind."""
        self.errors: list[str] = []
        """Mistakes of this server, which are to be none."""
        self.serving = threading.Event()
        self.port = 0
        self._server: Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where it listens, also while it is away."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen; again at the same port, if it was stopped."""
        self._server = Server(("127.0.0.1", self.port), self)
        self.port = self._server.server_address[1]
        self.serving.set()
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def stop(self) -> None:
        """Go away: nothing listens, and every connection ends."""
        if self._server is None or self._thread is None:
            return
        self.serving.clear()
        self._server.shutdown()
        self._thread.join()
        for connection in list(self._server.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._server = None
        with self.registry.store.lock:
            self.registry.store.changed.notify_all()

    def count(self, request: Request) -> None:
        """Count a request."""
        verb = request.method.lower()
        parts = request.path.split("/")
        if verb == "get":
            verb = "watch" if request.query.get("watch") in ("true", "1") else "get"
        kinds = [part for part in parts[3:] if part]
        if kinds[:1] == ["namespaces"] and len(kinds) > 2:
            kinds = kinds[2:]
        self.requests[verb, kinds[0] if kinds else request.path] += 1


class _Handler(BaseHTTPRequestHandler):
    """One connection, and its requests one after the other."""

    protocol_version = "HTTP/1.1"
    server: Server
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's
        """Say nothing."""

    def _serve(self) -> None:
        front = self.server.front
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(
            self.command,
            unquote(parts.path),
            dict(parse_qsl(parts.query, keep_blank_values=True)),
            self.headers.get("Content-Type", "application/json"),
            body,
        )
        front.count(request)
        failure = front.failures.meet(request)
        try:
            if failure is not None:
                self._meet(failure)
                if failure.what == DROP:
                    self._drop()
                    return
            found = answer(front.registry, request)
        except ApiError as error:
            found = Answer(error.code, error.text or error.status, error.headers)
        if failure is not None and failure.what == LOSE:
            self._drop()
            return
        if isinstance(found, Answer):
            self._send(found)
            return
        cut = failure.after if failure is not None and failure.what == CUT else None
        wanted = self._is_wanted
        if isinstance(found, Watch):
            lines = events(front.registry, found, wanted)
        else:
            try:
                lines = front.logs(found, wanted)
            except ApiError as error:
                self._send(Answer(error.code, error.status, error.headers))
                return
        kind = "application/json" if isinstance(found, Watch) else "text/plain"
        self._stream(lines, kind, cut)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815  # the base class's

    def _meet(self, failure: Failure) -> None:
        if failure.delay:
            time.sleep(failure.delay)
        if failure.what == 429:
            raise answers.too_many_requests()
        if failure.what == 410:
            raise answers.expired(1, 2)
        if isinstance(failure.what, int):
            raise ApiError(failure.what, "InternalError", "a failure on purpose")

    def _drop(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _is_wanted(self) -> bool:
        """Whether the client still listens, and the server still serves."""
        if not self.server.front.serving.is_set():
            return False
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return not readable or bool(self.connection.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):
            return False

    def _send(self, found: Answer) -> None:
        text = isinstance(found.body, str)
        data = found.body.encode() if text else json.dumps(found.body).encode()
        self.send_response(found.code)
        self.send_header("Content-Type", "text/plain" if text else "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in found.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, lines: Iterator[bytes], kind: str, cut: int | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, line in enumerate(lines):
            if cut is not None and number >= cut:
                self._drop()
                return
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.flush()
        if cut is not None or not self.server.front.serving.is_set():
            self._drop()
            return
        self.wfile.write(b"0\r\n\r\n")


def events(registry: Registry, watch: Watch, wanted: Callable[[], bool]) -> Iterator[bytes]:
    """Yield what happens to objects, one line of JSON each, until nobody listens any more.

    Args:
        registry: what is watched.
        watch: which objects, from when on and how long.
        wanted: whether someone still listens.
    """
    store = registry.store
    end = time.monotonic() + watch.seconds if watch.seconds else None
    with store.lock:
        version = watch.version
        if version is None:
            begun = store.list(watch.resource, watch.namespace, watch.matches)
            version = store.version
        else:
            begun = []
    for thing in begun:
        yield _line("ADDED", thing)
    told = version
    while wanted():
        try:
            with store.lock:
                news = store.since(version)
                if not news:
                    left = LOOK if end is None else min(LOOK, end - time.monotonic())
                    if left <= 0:
                        return
                    store.changed.wait(left)
                    news = store.since(version)
        except ApiError as error:
            yield _line("ERROR", error.status)
            return
        for change in news:
            version = change.version
            if (shown := _seen(change, watch)) is not None:
                told = version
                yield shown
        if watch.bookmarks and version > told + 100:
            told = version
            mark = {"metadata": {"resourceVersion": str(version), "creationTimestamp": None}}
            about = {"kind": watch.resource.kind, "apiVersion": watch.resource.api_version}
            yield _line("BOOKMARK", about | mark)


def _seen(change: Change, watch: Watch) -> bytes | None:
    """Return the line that a watch shows of a change, if it means the object."""
    if change.resource != watch.resource:
        return None
    if watch.namespace not in ("", change.new["metadata"].get("namespace", "")):
        return None
    is_meant = change.type != "DELETED" and watch.matches(change.new)
    was_meant = change.old is not None and watch.matches(change.old)
    if not is_meant and not was_meant:
        return None
    kind = "ADDED" if not was_meant else "MODIFIED" if is_meant else "DELETED"
    shown = change.new
    if kind == "DELETED" and change.old is not None:  # as it was when it was meant
        version = {"resourceVersion": shown["metadata"]["resourceVersion"]}
        shown = change.old | {"metadata": change.old["metadata"] | version}
    return _line(kind, shown)


def _line(kind: str, thing: Object) -> bytes:
    return json.dumps({"type": kind, "object": thing}).encode() + b"\n"
