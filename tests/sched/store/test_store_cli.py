"""`pipollux serve --store`: the same commands, with the store in PostgreSQL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sched.scripts import TOY
from tests.sched.store.postgresql import Server

PIPOLLUX = str(Path(sys.executable).with_name("pipollux"))


@pytest.mark.exhaustive
def test_a_store_in_postgresql(postgresql: Server, tmp_path: Path) -> None:
    """Other commands find it by the state directory; no password is printed, nor in the log."""
    (tmp_path / "cluster.yaml").write_text("nodes: [{name: a, slots: 1, kind: cpu}]")
    job = f"{{name: toy, script: {TOY}, args: [--steps, '3']}}"
    (tmp_path / "jobs.yaml").write_text(f"jobs: [{job}]")
    environment = {**os.environ, "PIPOLLUX_STATE_DIR": str(tmp_path / "state")}

    def pipollux(*args: str) -> subprocess.CompletedProcess[str]:
        command = [PIPOLLUX, *args]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )

    serve = [PIPOLLUX, "serve", "--cluster", "cluster.yaml"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with_url = {**environment, "PIPOLLUX_STORE": postgresql.new_database()}
    with subprocess.Popen(serve, cwd=tmp_path, env=with_url, **pipes) as server:
        assert server.stdout is not None
        said = server.stdout.readline()
        assert said.startswith("Serving 1 node with"), said
        done = pipollux("submit", "jobs.yaml", "--wait")
        assert done.returncode == 0, done.stderr
        server.send_signal(signal.SIGINT)
        said += server.communicate(timeout=240)[0]
    listed = pipollux("jobs", "--output", "json")
    assert [(job["name"], job["phase"]) for job in json.loads(listed.stdout)] == [
        ("toy", "Complete")
    ]
    assert pipollux("logs", "toy").returncode == 0
    postgresql.stop()
    try:
        refused = pipollux("jobs")
    finally:
        postgresql.start()
    assert refused.returncode == 1
    assert "cannot be used as a store: connection" in refused.stderr
    assert len(refused.stderr.splitlines()) <= 3
    assert "hunter2" not in said + done.stdout + listed.stderr + refused.stderr
