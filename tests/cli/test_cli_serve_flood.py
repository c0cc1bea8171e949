"""`pipollux serve` with more half-open connections than it may have descriptors."""

from __future__ import annotations

import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from pipollux_sched.store import StateDir

from .runner import PIPOLLUX

DESCRIPTORS = 256


@pytest.mark.exhaustive
def test_a_flood_keeps_nobody_from_being_answered(tmp_path: Path) -> None:
    state_dir = StateDir(tmp_path / "state")
    limited = f"ulimit -n {DESCRIPTORS}; exec {PIPOLLUX} serve --state-dir {state_dir.path}"
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            ["bash", "-c", limited], stdout=subprocess.PIPE, stderr=log, text=True
        ) as server,
        ExitStack() as half_open,
    ):
        half_open.callback(server.wait, 240)
        half_open.callback(server.terminate)
        assert server.stdout is not None
        assert server.stdout.readline().startswith("Serving 1 node")
        info = state_dir.read_server()
        assert info is not None
        before = psutil.Process(server.pid).memory_info().rss
        headers = {"Authorization": f"Bearer {info.token}"}
        for _ in range(2):
            for _ in range(DESCRIPTORS):
                connection = socket.create_connection(("127.0.0.1", info.port), timeout=240)
                half_open.enter_context(connection)
                connection.sendall(b"GET /jobs HTTP/1.1\r\nX-Half: ")
            # Without keeping the connection: each has to be let in anew.
            answer = httpx.get(f"{info.url}/jobs", headers=headers, trust_env=False, timeout=240)
            assert answer.json() == []
        assert psutil.Process(server.pid).num_fds() < DESCRIPTORS
        assert psutil.Process(server.pid).memory_info().rss < before + 50e6
        answer = httpx.get(
            f"{info.url}/healthz", headers={"Host": "evil.example"}, trust_env=False, timeout=240
        )
        assert answer.status_code == 400
    said = (tmp_path / "log").read_text().splitlines()
    assert len(said) == 1, said
    assert "more than 128 connections at once" in said[0]
