"""Scripts that never take a step hold a node and slots no longer than a start may take."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import programs
from tests.waiting import until

SILENT = """
import signal, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nor does it stop when it is asked to
print("waiting for the licence server", flush=True)
while True:
    time.sleep(0.05)
"""
CLUSTER = "nodes: [{name: node-a, kind: cpu, slots: 1}, {name: node-b, kind: cpu, slots: 1}]\n"


class Served:
    """A scheduler that was started with its command, and commands that ask it."""

    def __init__(self, folder: Path, *options: str, cluster: str = CLUSTER) -> None:
        self.folder = folder
        (folder / "cluster.yaml").write_text(cluster)
        (folder / "silent.py").write_text(SILENT)
        self.state = folder / "state"
        self.environment = {**os.environ, "PIPOLLUX_STATE_DIR": str(self.state)}
        command = [str(programs.PIPOLLUX), "serve", "--cluster", "cluster.yaml", "--port", "0"]
        command += ["--grace", "2", *options]
        self.server = programs.Command(command, self.environment, folder)
        until(lambda: "Ctrl-C ends it" in self.server.output, "the scheduler serves")

    def ask(self, *command: str, status: int = 0) -> str:
        """Run a command; return what it has printed."""
        found = subprocess.run(
            [str(programs.PIPOLLUX), *command],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert found.returncode == status, found.stdout + found.stderr
        return found.stdout + found.stderr

    def submit(self, name: str, **fields: str) -> None:
        given = "".join(f", {key}: {value}" for key, value in fields.items())
        job = f"jobs: [{{name: {name}, script: silent.py, max_restarts: 0{given}}}]\n"
        (self.folder / "jobs.yaml").write_text(job)
        self.ask("submit", "jobs.yaml")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    service = Served(tmp_path)
    with service.server:
        yield service
        service.server.send_signal(signal.SIGTERM)
        service.server.wait()


def runs(served: Served, name: str) -> bool:
    return "Running" in served.ask("describe", name)


def test_drain_waits_no_longer_than_a_start_may_take(served: Served) -> None:
    served.submit("silent", start_timeout="4", max_replicas="1")
    until(lambda: runs(served, "silent"), "it runs")
    node = "node-a" if "node-a" in served.ask("describe", "silent") else "node-b"
    drained = served.ask("drain", node, "--reason", "new fans", "--wait", "--timeout", "200")
    assert node in drained
    until(lambda: "Failed" in served.ask("describe", "silent"), "it has failed")
    assert "It ran for 4 s (start_timeout) and reported no" in served.ask("describe", "silent")


TEAMS = """
notice: 0
teams:
  - {name: text, quota: 1}
  - {name: vision, quota: 1}
"""


def test_a_team_gets_its_quota_back_from_a_script_that_takes_no_step(tmp_path: Path) -> None:
    (tmp_path / "teams.yaml").write_text(TEAMS)
    one = "nodes: [{name: node-a, kind: cpu, slots: 2}]\n"
    served = Served(tmp_path, "--teams", "teams.yaml", cluster=one)
    with served.server:
        for name in ("mine", "borrows"):
            served.submit(name, team="text", start_timeout="6", max_replicas="1")
            until(lambda name=name: runs(served, name), "it runs")
        served.submit("owner", team="vision", start_timeout="200", max_replicas="1")
        until(lambda: runs(served, "owner"), "the owner runs", 200)
        told = served.ask("describe", "borrows")
        assert "start_timeout" in told or "Queued" in told, told
        served.server.send_signal(signal.SIGTERM)
        served.server.wait()
