"""A scheduler with GPUs that is killed, and the next one; the driver is a library of the test."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cli.runner import LIGHT, Cli, wait_until
from tests.sched.backend.local.nvml import FakeNvml, build, gpu, uuid
from tests.sched.scripts import TOY


@pytest.mark.exhaustive
def test_jobs_are_adopted_on_their_gpus(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver lists them in another order now, and one of them needs a reset."""
    nvml = FakeNvml(build(tmp_path), tmp_path / "gpus", monkeypatch)
    nvml.set(gpu(0), gpu(1), gpu(2), gpu(3))
    cli.program = LIGHT
    cli.environment = {**os.environ, "PIPOLLUX_STATE_DIR": str(cli.state_dir)}
    nodes = "".join(f"  - {{name: node-{name}, slots: 2}}\n" for name in "ab")
    (cli.folder / "cluster.yaml").write_text(f"nodes:\n{nodes}")
    (cli.folder / "jobs.yaml").write_text(
        f"jobs:\n  - {{name: wide, script: {TOY}, num_stages: 2, max_replicas: 1}}\n"
    )
    server = cli.serve()
    assert cli("submit", "jobs.yaml").returncode == 0
    wait_until(lambda: bool(cli.jobs()["wide"]["training"]))
    server.send_signal(signal.SIGKILL)
    server.wait()
    nvml.set(gpu(3), gpu(2), gpu(1, remap_pending=1), gpu(0))
    again = cli.serve()
    job = cli.jobs()["wide"]
    assert (job["phase"], job["attempt"], job["running_on"]) == ("Running", 1, ("node-a",))
    assert f"{uuid(0)},{uuid(1)}" in cli("logs", "wide").stdout
    assert "a row of its memory waits to be remapped" in " ".join(cli("nodes").stdout.split())
    assert "node-a: slot 1 is left out. GPU 2 (GPU-00000001)" in again.errors
