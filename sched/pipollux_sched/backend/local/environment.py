"""The environment variables of a replica's processes."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping, Sequence

import psutil

from pipollux_protocol import environment as variables
from pipollux_sched.backend.base import Launch, Node, ReplicaKey, ReplicaProgram
from pipollux_sched.backend.replica.inherited import inherited
from pipollux_sched.backend.replica.variables import cpu_variables, gpu_variables, replica_variables

from .hardware import visible_gpus


class Devices:
    """The devices of replicas as environment variables; nodes divide the GPUs in their order."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._nodes = dict(nodes)
        self._first_gpu = _first_gpus(nodes)

    def moved(self, other: Devices) -> list[str]:
        """Return the GPU nodes of both whose first GPU differs."""
        return [
            name
            for name, first in self._first_gpu.items()
            if other._first_gpu.get(name, first) != first
        ]

    def of(self, node: str, slots: Sequence[int]) -> dict[str, str]:
        """Return the variables that show only its devices to a replica."""
        if self._nodes[node].spec.kind == "cpu":
            return cpu_variables(len(slots))
        visible = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        indices = [self._first_gpu[node] + slot for slot in slots]
        return {
            **gpu_variables(len(slots)),
            "CUDA_VISIBLE_DEVICES": ",".join(
                visible[index] if index < len(visible) else str(index) for index in indices
            ),
        }


def marks(state_dir: str, key: ReplicaKey) -> dict[str, str]:
    """Return the variables that identify the processes of one replica."""
    return {
        "PIPOLLUX_STATE_DIR": state_dir,
        **variables.JOB_ID.write(key.job),
        **variables.ATTEMPT.write(key.attempt),
        **variables.REPLICA.write(key.replica),
    }


def replica_environment(
    program: ReplicaProgram,
    launch: Launch,
    replica: int,
    *,
    devices: Mapping[str, str],
    marks: Mapping[str, str],
    pass_on: Collection[str] = (),
) -> dict[str, str]:
    """Return the complete environment of one replica.

    `marks` identify its processes; `pass_on` names variables of the scheduler besides `inherited`.
    """
    return {
        **inherited(os.environ, pass_on),
        **_meet_on(loopback_interface()),
        **devices,
        **replica_variables(program, launch, replica),
        **marks,
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
    """Divide the machine's GPUs among GPU nodes: return the index of each node's first GPU."""
    first, shared = 0, {}
    for name, node in nodes.items():
        if node.spec.kind == "gpu":
            shared[name] = first
            first += node.slots
    return shared
