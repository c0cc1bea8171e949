"""Events as they happen, over real HTTP: none missed, none twice, and an end."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipollux_sched.client.client import Client
from pipollux_sched.server import Limits, event_stream
from pipollux_sched.store import ServerInfo
from tests.sched.supervised import ADMIN, Service, detail


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(event_stream, "BATCH", 7)
    monkeypatch.setattr(event_stream, "KEPT", 20)
    with Service(tmp_path / "state", Limits(listeners=2)) as service:
        service.state_dir.write_server(ServerInfo(service.server.url, os.getpid(), ADMIN))
        yield service


def listen(
    service: Service, query: str = "", last: str | None = None
) -> AbstractContextManager[httpx.Response]:
    headers = {} if last is None else {"Last-Event-ID": last}
    return service.admin.stream("GET", f"/events/stream{query}", headers=headers)


def read(lines: Iterator[str], count: int) -> list[dict[str, Any]]:
    """Read so many events; each id is that of its object."""
    found: list[dict[str, Any]] = []
    identity = ""
    while len(found) < count:
        line = next(lines)
        if line.startswith("id: "):
            identity = line.removeprefix("id: ")
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            assert str(event["id"]) == identity
            found.append(event)
    return found


def add(service: Service, count: int) -> None:
    for number in range(count):
        service.store.add_event("test", {"number": number})


def test_all_from_the_first_on_and_what_comes(service: Service) -> None:
    """More than is kept in memory, and more than one batch."""
    add(service, 50)
    with listen(service, "?after=0") as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = response.iter_lines()
        found = read(lines, 50)
        for _ in range(3):
            add(service, 30)
            found += read(lines, 30)
    assert found == service.store.events()


def test_whoever_comes_back_misses_nothing(service: Service) -> None:
    add(service, 10)
    with listen(service, "?after=3") as response:
        first = read(response.iter_lines(), 4)
    add(service, 60)
    with listen(service, "?after=3", last=str(first[-1]["id"])) as response:
        rest = read(response.iter_lines(), 63)
    assert first + rest == service.store.events(3)


def test_from_now_on_and_one_job_alone(service: Service) -> None:
    add(service, 5)
    with listen(service) as now, listen(service, "?job=mine&after=0") as mine:
        lines, of_mine = now.iter_lines(), mine.iter_lines()
        assert next(lines).startswith("retry: ")
        service.submit("other")
        service.submit("mine")
        add(service, 30)
        service.submit("mine-too")
        assert [event["id"] for event in read(lines, 33)] == list(range(6, 39))
        (event,) = read(of_mine, 1)
        assert (event["type"], event["job"]) == ("submitted", "mine")
        with service.client(service.store.job("mine").token) as job:
            job.post("/jobs/mine/reports", json={"attempt": 1})
        service.admin.delete("/jobs/mine")
        assert read(of_mine, 1)[0]["type"] == "cancelled"


def test_silence_is_broken_by_a_comment(tmp_path: Path) -> None:
    limits = Limits(keep_alive=0.05)
    with Service(tmp_path / "quiet", limits) as service, listen(service) as response:
        lines = response.iter_lines()
        assert [next(lines), next(lines)] == ["retry: 2000", ""]
        assert [next(lines) for _ in range(4)] == [": nothing new", ""] * 2


def test_no_more_listen_than_can(service: Service) -> None:
    with listen(service) as first, listen(service) as second:
        texts = [first.iter_text(), second.iter_text()]  # to be let go of closes the connection
        assert [next(text) for text in texts] == ["retry: 2000\n\n"] * 2
        refused = service.admin.get("/events/stream")
        assert refused.status_code == 503
        assert "2 requests already listen to events" in detail(refused)
        assert refused.headers["Retry-After"] == "1"
    deadline = time.monotonic() + 240
    while True:  # whoever has gone has made room
        with listen(service) as third:
            if third.status_code == 200:
                break
        assert time.monotonic() < deadline


def test_listeners_hold_no_connection_and_end_with_the_server(service: Service) -> None:
    with Client.of(service.state_dir) as client:
        events = client.follow(0)
        service.submit("heard")
        assert next(events)["type"] == "submitted"
        # Nothing is checked out of the pool while it is quiet.
        pool = service.store._database._engine.pool
        deadline = time.monotonic() + 240
        while pool.checkedout():  # type: ignore[attr-defined]  # of every pool that queues
            assert time.monotonic() < deadline
        stopping = threading.Thread(target=service.stop_serving)
        stopping.start()
        assert list(events) == []
        stopping.join(240)
        assert not stopping.is_alive()


@pytest.mark.parametrize("last", ["seven", "-1", "1" * 19, "1.5"])
def test_ids_that_are_none(service: Service, last: str) -> None:
    response = service.admin.get("/events/stream", headers={"Last-Event-ID": last})
    assert response.status_code == 422
    assert f"Last-Event-ID is '{last}'" in detail(response)
    assert service.admin.get("/events/stream?after=-1").status_code == 422
