"""The real driver: what the scheduler reads of GPUs, against `nvidia-smi` and CUDA itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipollux_sched.backend.local.gpus.probe_process import GpuProbe
from pipollux_sched.backend.local.gpus.state import GpuReading
from pipollux_sched.backend.local.gpus.visible import select
from pipollux_sched.backend.local.local_gpus import LocalGpus
from pipollux_sched.spec.cluster import ClusterSpec, NodeSpec
from pipollux_sched.store import StateDir

pytestmark = pytest.mark.gpu

SEEN = """
import ctypes, sys, uuid
cuda, count, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
number = (ctypes.c_ubyte * 16)()
NO_DEVICE = 100
status = cuda.cuInit(0)
if status == NO_DEVICE:
    sys.exit()
assert status == cuda.cuDeviceGetCount(ctypes.byref(count)) == 0, status
for index in range(count.value):
    assert cuda.cuDeviceGet(ctypes.byref(device), index) == 0
    assert cuda.cuDeviceGetUuid(number, device) == 0
    print(f"GPU-{uuid.UUID(bytes=bytes(number))}")
"""
"""What CUDA itself sees; torch reads the variable, too, and would not ask CUDA."""


@pytest.fixture
def probe() -> Iterator[GpuProbe]:
    found = GpuProbe()
    yield found
    found.close()


def read(probe: GpuProbe) -> GpuReading:
    reading = probe.read()
    assert reading.error == ""
    assert reading.gpus
    return reading


def test_the_driver_and_its_tool_agree(probe: GpuProbe) -> None:
    tool = shutil.which("nvidia-smi")
    assert tool is not None
    query = "--query-gpu=index,uuid,name,memory.total"
    command = [tool, query, "--format=csv,noheader,nounits"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.stdout.splitlines()]
    found = read(probe).gpus
    assert [[str(gpu.index), gpu.uuid, gpu.name] for gpu in found] == [row[:3] for row in rows]
    for gpu, row in zip(found, rows, strict=True):
        assert gpu.use.memory_total is not None
        assert gpu.use.memory_total // 2**20 == int(row[3])


def cuda_sees(value: str | None) -> list[str]:
    environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if value is not None:
        environment["CUDA_VISIBLE_DEVICES"] = value
    command = [sys.executable, "-I", "-S", "-c", SEEN]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=True
    )
    return done.stdout.split()


FORMS = [None, "", "-1", "0", "0,-1", "0,99,0", "99", "0,0", "{uuid}", "{start}", "{uuid},{uuid}"]
FORMS += ["{start},0", "GPU-", "GPU-zz", "0,{uuid}", "MIG-{uuid}/0/0"]


@pytest.mark.parametrize("form", FORMS)
def test_cuda_sees_what_is_selected(form: str | None, probe: GpuProbe) -> None:
    gpus = read(probe).gpus
    if any(gpu.mig for gpu in gpus):
        pytest.skip("CUDA enumerates one slice only of a GPU in MIG mode")
    uuid = gpus[0].uuid
    value = None if form is None else form.format(uuid=uuid, start=uuid[:20])
    assert select(value, gpus) == cuda_sees(value)


def test_the_use_of_memory_and_the_process_are_seen(probe: GpuProbe) -> None:
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"

    def used() -> int:
        (gpu,) = (gpu for gpu in read(probe).gpus if gpu.uuid == uuid)
        assert gpu.use.memory_used is not None
        return gpu.use.memory_used

    torch.ones(1, device="cuda").sum().item()
    before = used()
    block = torch.ones(2**28, device="cuda")  # 1 GiB
    torch.cuda.synchronize()
    assert used() - before == pytest.approx(2**30, rel=0.05)
    (gpu,) = (gpu for gpu in read(probe).gpus if gpu.uuid == uuid)
    assert gpu.use.processes, "in a container the ids may be those of another PID namespace"
    assert gpu.problem == ""
    del block


def test_a_gpu_that_this_process_uses_is_left_out(state_dir: StateDir) -> None:
    """At once where its id is visible, else after a while, which is not waited for here."""
    torch.ones(1, device="cuda").sum().item()
    count = torch.cuda.device_count()
    gpus = LocalGpus(ClusterSpec(nodes=(NodeSpec(name="a", slots=count),)), state_dir)
    try:
        (first, *_) = gpus.devices()["a"]
        if f"process {os.getpid()} (" not in first.problem:
            assert first.problem == ""
            pytest.skip("the driver lists the ids of another PID namespace")
        assert 0 in gpus.nodes()["a"].left_out
    finally:
        gpus.close()


def test_reading_is_cheap(probe: GpuProbe) -> None:
    read(probe)
    began = time.perf_counter()
    for _ in range(5):
        read(probe)
    assert (time.perf_counter() - began) / 5 < 1.0, "the monitor reads every 10 s"


@pytest.fixture
def state_dir(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)
