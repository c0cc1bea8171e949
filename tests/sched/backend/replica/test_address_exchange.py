"""Agents that find each other through the scheduler, and what they say when they cannot."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipollux_agent import address_exchange
from tests.sched.supervised import Service


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path / "state") as service:
        yield service


def introduce(monkeypatch: pytest.MonkeyPatch, service: Service, job: str, token: str) -> None:
    """Set what the environment of an agent tells."""
    monkeypatch.setenv("PIPOLLUX_SCHEDULER_URL", service.server.url)
    monkeypatch.setenv("PIPOLLUX_JOB_ID", job)
    monkeypatch.setenv("PIPOLLUX_ATTEMPT", "1")
    monkeypatch.setenv("PIPOLLUX_TOKEN", token)


def test_agents_meet_where_replica_0_listens(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.submit("met", ["node-a", "node-b"])
    introduce(monkeypatch, service, "met", service.store.job("met").token)
    assert address_exchange.own_address() == "127.0.0.1", "the address on the way to the scheduler"
    with address_exchange.listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(2) as agents:
        port = listener.getsockname()[1]
        first = agents.submit(address_exchange.meet, 0, "127.0.0.1", port, 240.0)
        second = agents.submit(address_exchange.meet, 1, "127.0.0.1", 0, 240.0)
        assert first.result() == second.result() == ("127.0.0.1", port)
    monkeypatch.setenv("PIPOLLUX_ADDRESS", "10.1.2.3")
    assert address_exchange.own_address() == "10.1.2.3"


def test_agents_that_cannot_meet(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence each: who is missing, what the scheduler says, that it does not answer."""
    monkeypatch.setattr(address_exchange, "WAIT", 0.0)
    service.submit("alone", ["node-a", "node-b"])
    introduce(monkeypatch, service, "alone", service.store.job("alone").token)
    with pytest.raises(SystemExit):
        address_exchange.meet(0, "127.0.0.1", 29500, 0.0)
    assert "only 1 of 2 replicas were there in 0 s" in capsys.readouterr().err
    monkeypatch.setenv("PIPOLLUX_ATTEMPT", "7")
    with pytest.raises(SystemExit):
        address_exchange.meet(0, "127.0.0.1", 29500, 240.0)
    said = capsys.readouterr().err
    assert "answers 409" in said
    assert "attempt 7 of job 'alone' is not the current one" in said
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("PIPOLLUX_SCHEDULER_URL", url)
    with pytest.raises(SystemExit):
        address_exchange.meet(0, "127.0.0.1", 29500, 0.0)
    assert f"the scheduler does not answer at {url}" in capsys.readouterr().err


def test_collectives_use_the_interface_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "chosen")
    address_exchange.use_interface_of("127.0.0.1")
    assert address_exchange.os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert address_exchange.os.environ["NCCL_SOCKET_IFNAME"] == "chosen"
