"""The script and the commands of docs/howto/push-pull.md, as they stand but for their ports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hybrid.push_pull.jobs import servers
from tests.programs import Forked, free_port
from tests.waiting import until

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "push-pull.md"


KEPT = {"layer-00000.pt", "layer-00002.pt", "ledger.json"}
"""Files of the servers."""


def test_the_pages_script(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    with servers(2, tmp_path / "servers") as running, ExitStack() as started:
        told = {**os.environ, **running.environment(), "PYTHONWARNINGS": "error"}
        replicas = [
            started.enter_context(
                Forked(tmp_path / "train.py", (), {**told, "PIPOLLUX_REPLICA": str(replica)})
            )
            for replica in range(2)
        ]
        for replica in replicas:
            assert replica.wait() == 0, replica.errors
    assert {path.name for path in (tmp_path / "servers").iterdir()} == KEPT


@pytest.mark.exhaustive
def test_the_pages_commands(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    commands, _ = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    for port in ("7700", "7701"):
        assert port in commands
        commands = commands.replace(port, str(free_port()))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    output = tmp_path / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-c", f"set -e; {commands}\nwait $!"],  # for the first replica
            cwd=tmp_path,
            env=environment,
            start_new_session=True,
            stdout=file,
            stderr=file,
        )
    try:
        assert process.wait(240) == 0, output.read_text()
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        until(lambda: not _members(process.pid), "the servers have ended")
    assert {path.name for path in (tmp_path / "servers").iterdir()} == KEPT


@pytest.mark.exhaustive
def test_the_pages_job(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (jobs,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    _, commands = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "jobs.yaml").write_text(jobs)
    (tmp_path / "cluster.yaml").write_text("nodes: [{name: a, slots: 2, kind: cpu}]\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PIPOLLUX_STATE_DIR": str(tmp_path / "state")}
    serve = ["pipollux", "serve", "--cluster", "cluster.yaml", "--port", "0"]
    scheduler = subprocess.Popen(serve, cwd=tmp_path, env=environment)
    try:
        until(lambda: (tmp_path / "state" / "admin.token").exists(), "the scheduler serves")
        ran = subprocess.run(["bash", "-ec", commands], cwd=tmp_path, env=environment, timeout=240)
        assert ran.returncode == 0
    finally:
        scheduler.terminate()
        assert scheduler.wait(60) == 0
    (kept,) = (tmp_path / "state" / "jobs" / "slow-links" / "checkpoints").glob("**/servers")
    assert (kept / "ledger.json").exists()


def _members(group: int) -> list[str]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--sid", str(group)], capture_output=True, text=True, check=False
    )
    return found.stdout.split()
