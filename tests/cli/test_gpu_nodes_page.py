"""The files and commands of docs/howto/gpu-nodes.md, with a driver that the test makes."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from pipollux_sched.backend.local.gpus import foreign, monitor, probe_process
from pipollux_sched.spec.cluster import load_cluster
from pipollux_sched.spec.job import load_jobs
from pipollux_sched.store import NodeCondition
from tests.cli.runner import LIGHT, Cli
from tests.sched.backend.local.nvml import FakeNvml, build, gpu

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "gpu-nodes.md"


def test_the_pages_commands(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text()
    install, drain = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    cluster, jobs = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    nvml = FakeNvml(build(tmp_path), tmp_path / "gpus", monkeypatch)
    nvml.set(*map(gpu, range(3)), gpu(3, remap_pending=1), *map(gpu, range(4, 8)))
    cli.program = LIGHT
    cli.environment = {**os.environ, "PIPOLLUX_STATE_DIR": str(cli.state_dir)}
    (cli.folder / "cluster.yaml").write_text(cluster)
    (cli.folder / "jobs.yaml").write_text(jobs)
    gpus, cpus = load_cluster(cli.folder / "cluster.yaml").nodes
    assert (gpus.cpus, cpus.name, cpus.cpus) == (48, "gpu-box-cpu", 16)
    assert gpus.memory == 3 * (cpus.memory or 0) == 384 * 2**30
    assert [job.device for job in load_jobs(cli.folder / "jobs.yaml")] == ["cpu", "gpu"]

    _pip, serve, nodes = map(shlex.split, install.strip().splitlines())
    assert serve == ["pipollux", "serve", "--cluster", "cluster.yaml"]
    cli.serve(serving="Serving 2 nodes with 23 slots at")
    shown = " ".join(cli(*nodes[1:]).stdout.split())
    assert "GPU 3 (GPU-00000003): a row of its memory waits to be remapped" in shown
    begin, _reset, undo = map(shlex.split, drain.strip().splitlines())
    assert cli(*begin[1:]).stdout.startswith("gpu-box: draining; nothing runs there")
    nvml.set(*map(gpu, range(8)))
    assert cli(*undo[1:]).stdout.startswith("gpu-box: ready")
    assert NodeCondition.READY.value in cli("nodes").stdout


def test_the_page_names_the_limits() -> None:
    text = " ".join(PAGE.read_text().split())
    assert f"every {monitor.INTERVAL:.0f} seconds" in text
    assert f"have {foreign.LATE:.0f} seconds to exit" in text
    assert f"again {foreign.RETURN_AFTER:.0f} seconds after its last foreign process" in text
    assert f"gives it up after {probe_process.TIMEOUT:.0f} seconds" in text
    assert f"asks again after {probe_process.RETRY_AFTER / 60:.0f} minutes" in text
