"""The environment variables of a replica's processes."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import psutil

from pipollux_sched.backend.base import Node, ReplicaProgram

from .generation_file import GenerationFile
from .inherited import inherited


class Devices:
    """The devices that a replica may use, as environment variables.

    Args:
        nodes: all nodes of the cluster; its GPU nodes share out the machine's GPUs in this order.
    """

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._nodes = dict(nodes)
        self._first_gpu = _first_gpus(nodes)

    def of(self, node: str, slots: Sequence[int]) -> dict[str, str]:
        """Return the variables that show a replica its devices, and hide all others."""
        if self._nodes[node].kind == "cpu":
            return {
                "PIPOLLUX_DEVICES": ",".join(["cpu"] * len(slots)),
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
            }
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        indices = [self._first_gpu[node] + slot for slot in slots]
        return {
            "PIPOLLUX_DEVICES": ",".join(f"cuda:{stage}" for stage in range(len(slots))),
            "CUDA_VISIBLE_DEVICES": ",".join(
                visible[index] if index < len(visible) else str(index) for index in indices
            ),
        }


def marks(state_dir: str, job: str, generation: int) -> dict[str, str]:
    """Return the variables that identify the processes of one generation."""
    return {
        "PIPOLLUX_STATE_DIR": state_dir,
        "PIPOLLUX_JOB_ID": job,
        "PIPOLLUX_GENERATION": str(generation),
    }


def replica_environment(
    program: ReplicaProgram,
    record: GenerationFile,
    replica: int,
    *,
    state_dir: str,
    error_file: Path,
    pass_on: Collection[str] = (),
) -> dict[str, str]:
    """Return the complete environment of one replica.

    Args:
        program: what it runs.
        record: of its generation.
        replica: which of its replicas.
        state_dir: where the scheduler keeps everything.
        error_file: file for the exception that ends the script.
        pass_on: variables of the scheduler passed in addition to those of `inherited`.
    """
    return {
        **inherited(os.environ, pass_on),
        "PYTHONUNBUFFERED": "1",
        **_meet_on(loopback_interface()),
        **record.devices[replica],
        **program.environment,
        # The scheduler limits the time that a replica may take to save, not torchrun.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "86400",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        **marks(state_dir, record.job, record.generation),
        "PIPOLLUX_CHECKPOINT_DIR": str(record.checkpoints),
        "PIPOLLUX_NUM_NODES": str(len(set(record.nodes))),
        "PIPOLLUX_NUM_STAGES": str(program.num_stages),
    }


def _meet_on(interface: str | None) -> dict[str, str]:
    """Restrict the replicas' collectives to one network interface; None: any."""
    if interface is None:
        return {}
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)


@functools.cache
def loopback_interface() -> str | None:
    """Return the name of the loopback interface."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == "127.0.0.1" for entry in addresses):
            return name
    return None


def _first_gpus(nodes: Mapping[str, Node]) -> dict[str, int]:
    """Divide the machine's GPUs among GPU nodes: return the index of each one's first GPU."""
    first, shared = 0, {}
    for name, node in nodes.items():
        if node.kind == "gpu":
            shared[name] = first
            first += node.slots
    return shared
