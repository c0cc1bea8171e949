"""What this machine is found to be; a container's limits are files that the test writes."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch

from pipollux_sched.backend.local import hardware
from pipollux_sched.backend.local.hardware import count_cpus, count_gpus, node_name, this_machine
from pipollux_sched.spec.job import NodeSpec


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


def test_a_machine_with_gpus_has_a_slot_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,5")
    (node,) = this_machine().nodes
    assert (node.kind, node.slots) == ("gpu", 3)
    assert node.cpus == count_cpus()


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


def test_torch_is_asked_where_there_are_devices_and_no_tools(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a process of its own, as the scheduler never imports torch."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(hardware, "_DEVICE_FILES", (tmp_path / "device",))
    asked: list[list[str]] = []
    run = hardware._run

    def spy(command: list[str], timeout: float) -> str:
        asked.append(command)
        return run(command, timeout)

    monkeypatch.setattr(hardware, "_run", spy)
    assert count_gpus() == 0
    assert not asked, "there is no device"
    (tmp_path / "device").touch()
    assert count_gpus() == torch.cuda.device_count()
    assert len(asked) == 1


def test_tools_that_fail_count_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: one'; echo 'GPU 1: two'\n")
    tool.chmod(0o755)
    assert count_gpus() == 2
    tool.write_text("#!/bin/sh\necho 'GPU 0: one'; exit 9\n")
    assert count_gpus() == 0
