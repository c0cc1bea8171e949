"""What a connection held is freed when it ends, without a look for cyclic garbage."""

from __future__ import annotations

import gc
import time
from pathlib import Path

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pipollux_sched.server.connections import BoundedProtocol
from tests.sched.supervised import ADMIN, Service, report

TIMEOUT = 240.0


def held() -> int:
    """How many connections and requests are in memory, those that have ended included."""
    return sum(type(found) in (BoundedProtocol, RequestResponseCycle) for found in gc.get_objects())


def test_ended_connections_leave_nothing_behind(tmp_path: Path) -> None:
    """By the short way of what jobs send, by the framework, and without an answer."""
    with Service(tmp_path) as service:
        service.submit("a", ["node-a"])
        token = service.store.job("a").token
        gc.collect()
        gc.disable()
        try:
            for number in range(30):
                with service.client(token) as client:
                    assert client.post("/jobs/a/reports", json=report(step=number)).is_success
                    client.put("/jobs/a/hints?generation=1", json={})
                    assert client.get("/jobs").status_code == 401
                with service.client(ADMIN) as client:
                    assert client.get("/jobs/a").is_success
                    assert client.get("/nowhere").status_code == 404
            service.admin.close()
            deadline = time.monotonic() + TIMEOUT
            while (left := held()) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert left == 0
        finally:
            gc.enable()
