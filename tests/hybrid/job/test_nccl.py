"""Which of torch's NCCL backends groups have. Gloo is in NCCL's place, under its names."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from pipollux_hybrid import ConfigurationError
from pipollux_hybrid.job import nccl
from pipollux_hybrid.job.groups import abort_device_groups, carrier_of
from tests.hybrid.replicas import run_replicas


def install(folder: Path, *backends: str) -> None:
    """Put a distribution of torch backends into a folder."""
    metadata = folder / "backends-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: backends\nVersion: 1.0\n")
    lines = [f"{name} = backends:register" for name in backends]
    (metadata / "entry_points.txt").write_text(
        "\n".join(["[torch.distributed.backends]", *lines]) + "\n"
    )


def test_the_class_with_several_devices_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own name, where torch has one."""
    monkeypatch.syspath_prepend(tmp_path)
    if int(torch.__version__.split(".")[1]) < 14:
        assert nccl.name_for_several_devices() == "nccl"
    install(tmp_path, "nccl", "nccl-legacy", "nccl2")
    assert nccl.name_for_several_devices() == "nccl-legacy"


def make(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def stages_on(backend: str, *devices: str) -> tuple[bool, str, str]:
    """Return what is known of a group that the script makes, and why stages are refused."""
    dist.Backend.register_backend("nccl-new", make, devices=["cuda"])
    setattr(dist, "ProcessGroupNCCL2", dist.ProcessGroupGloo)  # noqa: B010  # unknown to mypy
    dist.init_process_group(backend)
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = torch.device("cuda", 1)
    found = nccl.sends_cuda(), str(carrier_of(world, torch.device("cuda", 1)))
    try:
        nccl.check_devices([*map(torch.device, devices)])
        said = ""
    except ConfigurationError as error:
        said = str(error)
    abort_device_groups({1 - dist.get_rank()})
    dist.destroy_process_group()
    return (*found, said)


@pytest.mark.parametrize("backend", ["nccl-new", "cpu:gloo,cuda:nccl-new"])
def test_stages_on_devices_that_the_group_does_not_send_are_refused(backend: str) -> None:
    for found in run_replicas(stages_on, 2, backend, "cuda:2", "cuda:3"):
        sends, carrier, said = found
        assert (sends, carrier) == (True, "cuda:1")
        assert f"was initialized with '{backend}'" in said
        assert "one device of each process, cuda:1 here, and this process has stages on" in said
        assert "cuda:2, cuda:3: call pipollux.init_process_group() instead" in said
    assert run_replicas(stages_on, 2, backend, "cuda:1") == [(True, "cuda:1", "")] * 2


def test_gloo_sends_from_everywhere() -> None:
    assert run_replicas(stages_on, 2, "gloo", "cuda:2") == [(False, "cpu", "")] * 2
