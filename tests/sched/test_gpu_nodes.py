"""GPUs of a scheduler, from the driver to what users see; the driver is a library of the test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pipollux_sched.backend.local.gpus import foreign, monitor
from pipollux_sched.scheduler import Scheduler
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import StateDir
from tests.programs import run_pipollux
from tests.sched.backend.local.nvml import GIB, FakeNvml, build, gpu, process, uuid
from tests.sched.scripts import TOY
from tests.sched.supervised import NO_TLS
from tests.waiting import until

CLUSTER = """
nodes:
  - {name: gpu-box, slots: 2, cpus: 8, cpu_slots: 2}
"""


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.setattr(monitor, "INTERVAL", 0.1)
    monkeypatch.setattr(monitor, "SHARE", 1.0)
    monkeypatch.setattr(foreign, "RETURN_AFTER", 0.0)
    return FakeNvml(build(tmp_path), tmp_path / "gpus", monkeypatch)


def said(state_dir: StateDir, *command: str) -> str:
    """Return what a command prints, on one line."""
    done = run_pipollux(*command, "--state-dir", str(state_dir.path))
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def ask(scheduler: Scheduler, path: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {scheduler.admin_token}"}
    url = f"{scheduler.url}{path}"
    return httpx.get(url, headers=headers, timeout=60, verify=NO_TLS).raise_for_status()


def left_out(scheduler: Scheduler, job: str) -> list[str]:
    """Return what the explanation of a job says about GPUs."""
    limits = ask(scheduler, f"/jobs/{job}/explanation").json()["limits"]
    return [limit["text"] for limit in limits if limit["kind"] == "left_out"]


@pytest.mark.usefixtures("light_agent")
@pytest.mark.exhaustive
def test_users_see_the_gpus_and_what_is_wrong_with_them(
    state_dir: StateDir, tmp_path: Path, nvml: FakeNvml
) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER)
    pid = os.getppid()
    other = f"used by process {pid} ({psutil.Process(pid).name()})"
    wide = JobSpec(name="wide", script=str(TOY), num_stages=2, max_replicas=1, preemptible=False)
    light = JobSpec(name="light", script=str(TOY), device="cpu", max_replicas=1)
    nvml.set(gpu(0), gpu(1), process(pid))
    with Scheduler(state_dir, cluster, interval=0.3) as scheduler:
        for spec in (wide, light):
            scheduler.submit(spec)
        assert scheduler.wait(lambda jobs: jobs["light"].state.training, 240)
        job = scheduler.jobs()["light"]
        assert job.state.running_on == ("gpu-box-cpu",)
        assert scheduler.jobs()["wide"].state.assigned == (), "one GPU is another program's"
        (limit,) = left_out(scheduler, "wide")
        assert limit.startswith(f"No job may start on GPU 1 (GPU-00000001) of gpu-box: {other}")
        assert left_out(scheduler, "light") == []

        nvml.set(gpu(1, used=61 * GIB, util=80), gpu(0, used=20 * GIB, util=90))
        assert scheduler.wait(lambda jobs: jobs["wide"].state.training, 240)

        def use() -> Any:
            jobs = ask(scheduler, "/overview").json()["jobs"]
            return {job["name"]: job["device_use"] for job in jobs}["wide"]

        total = {"num_devices": 2, "memory_used": 81 * GIB, "memory_total": 282 * GIB}
        until(lambda: use() == {**total, "utilization": pytest.approx(0.85)}, "its use is known")
        assert "gpu-box 1 GPU 0 (GPU-00000001) NVIDIA-H200 80 % 61 of 141 GiB" in said(
            state_dir, "describe", "wide"
        )
        metrics = ask(scheduler, "/metrics").text
        labels = f'{{id="{uuid(1)}",job="wide",node="gpu-box",slot="1"}}'
        (line,) = (
            line
            for line in metrics.splitlines()
            if line.startswith(f"pipollux_device_memory_used_bytes{labels} ")
        )
        assert float(line.split()[-1]) == 61 * GIB
        assert f"pipollux_device_usable{labels} 1.0" in metrics
        environment = json.loads(state_dir.log("wide", 1, 0).read_text().splitlines()[0])
        assert environment["CUDA_VISIBLE_DEVICES"] == f"{uuid(0)},{uuid(1)}"
        assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert environment["PIPOLLUX_DEVICES"] == "cuda:0,cuda:1"

        nvml.set(gpu(0, remap_pending=1), gpu(1))
        (limit,) = until(lambda: left_out(scheduler, "wide"), "it is known")
        assert limit.startswith("It stays on GPU 0 (GPU-00000000) of gpu-box: a row of its memory")
        (node, _) = ask(scheduler, "/nodes").json()
        assert (node["slots"], node["free"]) == (2, 0)
        assert scheduler.jobs()["wide"].state.running_on == ("gpu-box",), "it may stay"
        scheduler.control.cancel("wide")
        assert scheduler.wait(lambda jobs: jobs["wide"].phase.ended, 240)
        until(lambda: ask(scheduler, "/nodes").json()[0]["slots"] == 1, "its GPU is left out")
