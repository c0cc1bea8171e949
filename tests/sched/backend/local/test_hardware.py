"""What this machine is found to be; a container's limits are files that the test writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from pipollux_sched.backend.local import hardware
from pipollux_sched.backend.local.hardware import count_cpus, count_gpus, node_name, this_machine
from pipollux_sched.spec.cluster import NodeSpec
from tests.extent import first_points


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("gpu-7", "gpu-7"),
        ("GPU_Box.example.com", "gpu-box"),
        ("10.0.0.7", "node-10"),
        ("_", "node"),
        ("", "node"),
        ("x" * 200, "x" * 50),
        ("a" * 49 + "--b", "a" * 49),
    ],
)
def test_every_host_has_a_name_that_a_cluster_file_could_have(host: str, name: str) -> None:
    assert node_name(host) == name
    assert NodeSpec(name=name, slots=1).name == name


def test_a_machine_without_gpus_has_a_slot_for_each_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    (node,) = this_machine().nodes
    cpus = len(os.sched_getaffinity(0))
    assert (node.kind, node.slots, node.cpus) == ("cpu", cpus, cpus)
    assert node.memory == psutil.virtual_memory().total


def add_gpus(folder: Path, count: int) -> None:
    """Make an nvidia-smi that lists so many GPUs."""
    program = folder / "nvidia-smi"
    lines = "".join(f"echo 'GPU {n}: NVIDIA (UUID: GPU-{n})'\n" for n in range(count))
    program.write_text(f"#!/bin/sh\n{lines}")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("visible", "count"),
    first_points(
        9,
        [
            *((None, 8), ("0,3,5", 3), ("", 0), ("0,0", 0), ("0,-1,1", 1), ("7,x,2", 1)),
            *(("GPU-1,GPU-2", 2), ("GPU-1,GPU-1", 0), ("MIG-a,MIG-b", 0)),
            *((" 0 , 1", 2), ("none", 0), ("all", 0), ("NoDevFiles", 0), ("-1", 0), ("0,8,1", 1)),
            ("GPU-1,3", 1),
        ],
    ),
)
def test_a_machine_with_gpus_has_a_slot_for_each_visible_one(
    visible: str | None, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By CUDA's rules: the list ends at the first invalid entry, a repeated one empties it."""
    add_gpus(tmp_path, 8)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count
    (node,) = this_machine().nodes
    assert (node.kind, node.slots) == (("gpu", count) if count else ("cpu", count_cpus()))


def test_no_variable_makes_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    add_gpus(tmp_path, 0)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for visible in ("0", "GPU-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert count_gpus() == 0


@pytest.mark.parametrize(
    ("limit", "cpus"), [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1)]
)
def test_a_container_has_what_its_cgroup_allows(
    limit: str, cpus: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    (tmp_path / "memory.max").write_text("1048576\n")
    (node,) = this_machine().nodes
    assert node.slots == (cpus or len(os.sched_getaffinity(0)))
    assert node.memory == 1048576


@pytest.mark.exhaustive
def test_torch_is_asked_where_there_are_devices_and_no_tools(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a process of its own, as the scheduler never imports torch."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(hardware, "_DEVICE_FILES", (tmp_path / "device",))
    asked: list[list[str]] = []
    run = hardware._run

    def spy(command: list[str], *options: Any) -> str:
        asked.append(command)
        return run(command, *options)

    monkeypatch.setattr(hardware, "_run", spy)
    assert count_gpus() == 0
    assert not asked, "there is no device"
    (tmp_path / "device").touch()
    assert count_gpus() == torch.cuda.device_count()
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("package", "why"),
    [
        (
            False,
            "the package nvidia-ml-py is missing; install it with: pip install 'pipollux[gpu]'",
        ),
        (True, "their driver cannot be asked (NVML Shared Library Not Found)"),
    ],
)
def test_gpus_without_a_way_to_ask_for_their_state_are_announced(
    package: bool,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    add_gpus(tmp_path, 2)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if not package:
        monkeypatch.setattr(hardware, "find_spec", lambda _name: None)
    monkeypatch.setattr(hardware, "_DEVICE_FILES", (tmp_path / "device",))
    assert count_gpus() == 2
    assert caplog.messages == [], "nothing says that these are NVIDIA's"
    (tmp_path / "device").touch()
    assert count_gpus() == 2
    (said,) = caplog.messages
    assert said == f"this machine has NVIDIA GPUs, and {why}; their health and use are unknown"


def test_a_package_that_cannot_be_used_is_like_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a machine without GPUs, too."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for broken in ("raise ImportError('too old')", "raise ValueError('what')"):
        (tmp_path / "pynvml.py").write_text(broken)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        assert this_machine().nodes[0].kind == "cpu"


def test_tools_that_fail_count_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: one'; echo 'GPU 1: two'\n")
    tool.chmod(0o755)
    assert count_gpus() == 2
    tool.write_text("#!/bin/sh\necho 'GPU 0: one'; exit 9\n")
    assert count_gpus() == 0
