"""Real receivers of notifications on the loopback interface: an HTTP server and a mail server."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import socketserver
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()


class Received(NamedTuple):
    headers: Mapping[str, str]
    body: bytes
    status: int
    """What was answered."""

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found

    def is_signed(self, secret: str = SECRET) -> bool:
        """Check the signature from the specification, not with the code under test."""
        key = base64.b64decode(secret.removeprefix("whsec_"))
        head = f"{self.headers['webhook-id']}.{self.headers['webhook-timestamp']}."
        digest = hmac.digest(key, head.encode() + self.body, hashlib.sha256)
        expected = f"v1,{base64.b64encode(digest).decode()}"
        return hmac.compare_digest(expected, self.headers["webhook-signature"])


class Receiver:
    """An HTTP server that answers with the next of `statuses`, then with 204."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.requests: list[Received] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.at_once = 0
        """So many requests are answered whatever `may_answer` says."""
        self.headers: dict[str, str] = {}
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                status = receiver._note(dict(self.headers), body)
                if len(receiver.requests) > receiver.at_once:
                    receiver.may_answer.wait(240)
                self.send_response(status)
                for name, value in receiver.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/hooks/T0KEN"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def _note(self, headers: Mapping[str, str], body: bytes) -> int:
        with self._lock:
            status = self.statuses.pop(0) if self.statuses else 204
            lower = {name.lower(): value for name, value in headers.items()}
            self.requests.append(Received(lower, body, status))
            return status

    @property
    def texts(self) -> list[str]:
        return [received.data["data"]["text"] for received in self.requests]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class MailServer:
    """An SMTP server that keeps the mail that it gets."""

    def __init__(self) -> None:
        self.mails: list[str] = []
        server = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self._say("220 mail.test ESMTP")
                for line in iter(self.rfile.readline, b""):
                    match line.split()[0].upper():
                        case b"EHLO":
                            self._say("250-mail.test\r\n250 AUTH PLAIN LOGIN")
                        case b"AUTH":
                            self._say("235 accepted")
                        case b"DATA":
                            self._say("354 go ahead")
                            server.mails.append(self._mail())
                            self._say("250 kept")
                        case b"QUIT":
                            self._say("221 bye")
                            return
                        case _:
                            self._say("250 fine")

            def _mail(self) -> str:
                lines = []
                while (line := self.rfile.readline()) not in (b".\r\n", b""):
                    lines.append(line.decode())
                return "".join(lines)

            def _say(self, text: str) -> None:
                self.wfile.write(f"{text}\r\n".encode())

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
