"""A scheduler that hears what jobs report, over real HTTP, and may be away."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from pipollux_hybrid.telemetry.reporter import Reporter
from pipollux_hybrid.telemetry.step_record import StepRecord
from tests.programs import free_port

TOKEN = "a-token-of-the-job"


class Request(NamedTuple):
    method: str
    path: str
    token: str
    body: Any


def environment(url: str) -> dict[str, str]:
    return {
        "PIPOLLUX_SCHEDULER_URL": url,
        "PIPOLLUX_JOB_ID": "a-job",
        "PIPOLLUX_ATTEMPT": "3",
        "PIPOLLUX_TOKEN": TOKEN,
        "PIPOLLUX_HINTS_INTERVAL": "1",
        "PIPOLLUX_HEARTBEAT_INTERVAL": "0",
    }


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Supervisor:
    """A scheduler that can be away, over real HTTP on one port."""

    def __init__(self, status: int = 204) -> None:
        self.status = status
        self.again: float | None = None
        """Seconds that reports are told to wait; None: they are answered without a word."""
        self.failing: set[str] = set()
        self.port = free_port()
        self.heard: list[Request] = []
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        supervisor = self

        class Handler(BaseHTTPRequestHandler):
            def take(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                token = self.headers.get("Authorization", "")
                supervisor.heard.append(Request(self.command, self.path, token, body))
                fails = self.command in supervisor.failing
                told = self.command == "POST" and supervisor.again is not None
                self.send_response(500 if fails else 200 if told else supervisor.status)
                content = json.dumps({"again": supervisor.again}).encode() if told else b""
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_PUT = do_POST = take  # noqa: N815  # the base class's names

            def log_message(self, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join(240)
            self._server.server_close()
            self._server = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def bodies(self, method: str) -> list[Any]:
        return [request.body for request in self.heard if request.method == method]

    def points(self) -> list[Any]:
        return [point for body in self.bodies("POST") for point in body["points"]]

    def steps(self) -> list[int]:
        return [point["step"] for point in self.points()]


def record(step: int, at: float, **known: Any) -> StepRecord:
    fields: dict[str, Any] = dict.fromkeys(("epoch", "samples", "accum_steps"), 0)
    fields |= dict.fromkeys(("predicted_step_time", "goodput", "efficiency", "loss"), None)
    fields |= dict.fromkeys(("batch_size", "atomic_bsz", "num_replicas"), 1)
    return StepRecord(time=at, step=step, step_time=0.1, **(fields | known))


def tell(reporter: Reporter, step: int, **known: Any) -> None:
    made = record(step, float(step), **known)
    reporter.note_loss(step, made.loss)
    reporter.add_point(made.time, lambda: made)
