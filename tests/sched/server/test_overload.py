"""What is too much is refused at once, what nobody waits for is not computed, and jobs wait.

Applications that hold every request until a test lets it go stand for one that is too slow.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import anyio.to_thread
import httpx
import pytest
from starlette.types import Receive, Scope, Send

from pipollux_hybrid.job.env import JobEnvironment
from pipollux_hybrid.job.heartbeat import Heartbeat
from pipollux_hybrid.job.supervisor_client import retry_after
from pipollux_sched.client.connection import ClientError, Connection
from pipollux_sched.controller.event_loop_monitor import MOST_AHEAD, EventLoopMonitor
from pipollux_sched.controller.heartbeats import Heartbeats
from pipollux_sched.server import Limits
from pipollux_sched.server.http_server import HttpServer
from pipollux_sched.server.overload import (
    LATEST_TURN,
    Overload,
    RequestKind,
    RetrySchedule,
    kind_of,
)
from pipollux_sched.server.roles import ACCESS, Access
from tests.sched.supervised import Service, report

PATIENCE = 240.0
LIMITS = Limits(reporting=2, reading=3, pages=1)


class Held:
    """An application that answers when it is let go, and notes what reached it."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        self.begun.append(scope["path"])
        await anyio.to_thread.run_sync(self.go.wait, PATIENCE)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def wait_for(self, number: int) -> None:
        until(lambda: len(self.begun) >= number)


@contextmanager
def served(app: Held) -> Iterator[tuple[httpx.Client, Overload]]:
    overload = Overload(app, LIMITS)
    server = HttpServer(overload, "127.0.0.1", 0)
    server.start()
    try:
        with httpx.Client(base_url=server.url, trust_env=False, timeout=PATIENCE) as client:
            yield client, overload
    finally:
        app.go.set()
        server.stop()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def test_every_request_is_of_a_kind() -> None:
    of_jobs = {path for (_, path), access in ACCESS.items() if access is Access.JOB}
    kinds = {path.rpartition("/")[2]: kind_of(path.format(name="heartbeats")) for path in of_jobs}
    assert kinds == {
        "heartbeats": RequestKind.VITAL,
        "stops": RequestKind.VITAL,
        "replicas": RequestKind.VITAL,
        "inheritance": RequestKind.VITAL,
        "reports": RequestKind.REPORT,
        "hints": RequestKind.REPORT,
    }
    others = {path for (_, path) in ACCESS} - of_jobs
    assert {path for path in others if kind_of(path) is not RequestKind.PAGE} == {
        "/healthz",
        "/events/stream",
    }


def test_of_each_kind_so_many_and_never_too_many_heartbeats() -> None:
    app = Held()
    with served(app) as (client, overload), ThreadPoolExecutor(6) as pool:
        reports = [pool.submit(client.post, "/jobs/a/reports", json={}) for _ in range(2)]
        app.wait_for(2)
        refused = client.put("/jobs/a/hints", json={})
        assert refused.status_code == 503
        assert refused.headers["Retry-After"] == "1"
        assert "too much to do at the moment; ask again after 1 s" in refused.json()["detail"]
        pages = [pool.submit(client.get, "/overview") for _ in range(3)]
        until(lambda: overload._under_way[RequestKind.PAGE] == 3 and len(app.begun) == 3)
        assert client.get("/nodes").status_code == 503
        assert app.begun == ["/jobs/a/reports"] * 2 + ["/overview"], "two wait for the first"
        beat = pool.submit(client.post, "/jobs/a/heartbeats", json={})
        app.wait_for(4)
        assert app.begun[3:] == ["/jobs/a/heartbeats"]
        app.go.set()
        answers = [one.result(PATIENCE).status_code for one in (*reports, *pages, beat)]
        assert answers == [204] * 6
        assert client.post("/jobs/a/reports", json={}).status_code == 204, "places are free again"


def test_what_nobody_waits_for_is_not_computed() -> None:
    app = Held()
    with served(app) as (client, _), ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.get, "/first")
        app.wait_for(1)
        host, port = client.base_url.host, client.base_url.port
        assert port is not None
        with socket.create_connection((host, port), PATIENCE) as impatient:
            impatient.sendall(b"GET /impatient HTTP/1.1\r\nHost: a\r\n\r\n")
        app.go.set()
        assert first.result(PATIENCE).status_code == 204
        assert client.get("/last").status_code == 204
    assert app.begun == ["/first", "/last"]


def test_those_refused_together_do_not_come_together() -> None:
    turns = RetrySchedule(100.0, clock=lambda: 5.0)
    seconds = [turns.next() for _ in range(10_000)]
    assert seconds == sorted(seconds)
    assert seconds.count(1) == seconds.count(20) == 100
    assert seconds[-1] == LATEST_TURN


def test_a_clock_that_stands_still_while_nobody_listens() -> None:
    now = 0.0
    clock = EventLoopMonitor(lambda: now)
    beats = Heartbeats(clock)
    beats.note("a", 1, 0)
    for _ in range(5):
        now += 1.0
        clock.tick()
    assert clock() == 5.0
    now += 600.0
    assert clock() == 5.0 + MOST_AHEAD
    assert beats.lost(60.0) == [], "what it did not listen for is nobody's silence"
    clock.tick()
    assert clock() == 5.0 + MOST_AHEAD
    for _ in range(60):
        now += 1.0
        clock.tick()
    assert [lost.job for lost in beats.lost(60.0)] == ["a"]


def test_a_server_ticks() -> None:
    ticks = []
    server = HttpServer(Overload(Held(), LIMITS), "127.0.0.1", 0, tick=lambda: ticks.append(1))
    server.start()
    try:
        until(lambda: len(ticks) >= 2)
    finally:
        server.stop()


class Busy:
    """An application that has too much to do for the first few requests."""

    def __init__(self, number: int, retry: str = "0") -> None:
        self._left, self._retry = number, retry
        self.answered = 0

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        self._left -= 1
        self.answered += self._left < 0
        head = {"status": 503, "headers": [(b"retry-after", self._retry.encode())]}
        taken = {"status": 200, "headers": [(b"content-length", b"2")]}
        await send({"type": "http.response.start", **(head if self._left >= 0 else taken)})
        await send({"type": "http.response.body", "body": b"" if self._left >= 0 else b"{}"})


@contextmanager
def busy(app: Busy) -> Iterator[str]:
    server = HttpServer(app, "127.0.0.1", 0)
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


def test_a_command_waits_for_a_busy_scheduler() -> None:
    with busy(Busy(3)) as url:
        connection = Connection(url, "token")
        assert connection.request("GET", "/nodes").status_code == 200
        connection.close()
    with busy(Busy(3, retry="3600")) as url:
        connection = Connection(url, "token")
        with pytest.raises(ClientError, match="answered with status 503"):
            connection.request("GET", "/nodes")
        connection.close()


def test_a_replica_waits_for_a_busy_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    app = Busy(3)
    with busy(app) as url:
        variables = {
            "PIPOLLUX_SCHEDULER_URL": url,
            "PIPOLLUX_JOB_ID": "a",
            "PIPOLLUX_ATTEMPT": "1",
            "PIPOLLUX_TOKEN": "token",
            "PIPOLLUX_HEARTBEAT_INTERVAL": "3600",
        }
        beat = Heartbeat.start(JobEnvironment.read(variables), lambda: 1)
        assert beat is not None
        until(lambda: app.answered)
        beat.close(goodbye=False)
    assert not caplog.records, "it is no fault"


def test_what_is_no_request_to_come_later() -> None:
    assert retry_after(httpx.Response(503, headers={"Retry-After": "7"})) == 7.0
    assert retry_after(httpx.Response(429, headers={"Retry-After": "2"})) == 2.0
    for status, header in ((503, {}), (200, {"Retry-After": "7"}), (503, {"Retry-After": "Mon"})):
        assert retry_after(httpx.Response(status, headers=header)) is None


def test_a_scheduler_refuses_and_counts_it(tmp_path: Path) -> None:
    with Service(tmp_path / "state", Limits(reporting=0)) as service:
        job = service.submit("full", ["node-a"])
        refused = job.post("/jobs/full/reports", json=report())
        assert refused.status_code == 503
        assert float(refused.headers["Retry-After"]) >= 1.0
        beat = {"attempt": 1, "replica": 0}
        assert job.post("/jobs/full/heartbeats", json=beat).status_code == 200
        sample = service.metrics.registry.get_sample_value
        assert sample("pipollux_requests_refused_total", {"reason": "busy"}) == 1.0
