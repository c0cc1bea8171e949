"""What a connection held is freed when it ends, without a look for cyclic garbage."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pipollux_sched.server.connections import BoundedProtocol
from tests.sched.supervised import ADMIN, Service, report

TIMEOUT = 240.0


def watch(monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> WeakSet[Any]:
    """Return the objects of a class that are made from now on, and are in memory still."""
    made: WeakSet[Any] = WeakSet()
    make = kind.__init__

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        made.add(self)

    monkeypatch.setattr(kind, "__init__", note)
    return made


def test_ended_connections_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the short way of what jobs send, by the framework, and without an answer."""
    gc.collect()
    gc.disable()
    try:
        with Service(tmp_path) as service:
            service.submit("a", ["node-a"])
            token = service.store.job("a").token
            held = [watch(monkeypatch, kind) for kind in (BoundedProtocol, RequestResponseCycle)]
            for number in range(10):
                with service.client(token) as client:
                    assert client.post("/jobs/a/reports", json=report(step=number)).is_success
                    client.put("/jobs/a/hints?attempt=1", json={})
                    assert client.get("/jobs").status_code == 401
                    assert [len(made) for made in held] != [0, 0]
                with service.client(ADMIN) as client:
                    assert client.get("/jobs/a").is_success
                    assert client.get("/nowhere").status_code == 404
            deadline = time.monotonic() + TIMEOUT
            while any(held) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert [len(made) for made in held] == [0, 0]
    finally:
        gc.enable()
