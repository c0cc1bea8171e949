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

from .hardware import ORDER, VISIBLE

STATE_DIR = "PIPOLLUX_STATE_DIR"
"""The variable that marks the processes of one scheduler's jobs."""


class Devices:
    """The devices of replicas as environment variables.

    Args:
        nodes: the nodes by name.
        gpus: the GPU or MIG slice of each slot of the GPU nodes, by UUID, or by index.
        in_pci_order: whether indices follow PCI bus ids; else they are CUDA's own.
    """

    def __init__(
        self,
        nodes: Mapping[str, Node],
        gpus: Mapping[str, Sequence[str]],
        *,
        in_pci_order: bool = True,
    ) -> None:
        self._nodes = dict(nodes)
        self.gpus = gpus
        order = os.environ.get(ORDER, "FASTEST_FIRST")
        self._order = {ORDER: "PCI_BUS_ID" if in_pci_order else order}

    def moved(self, other: Devices) -> list[str]:
        """Return the nodes of both of which another node would have a GPU."""
        owners = {uuid: name for name, row in other.gpus.items() for uuid in row}
        return [
            name
            for name, row in self.gpus.items()
            if name in other.gpus and any(owners.get(uuid, name) != name for uuid in row)
        ]

    def of(self, node: str, slots: Sequence[int]) -> dict[str, str]:
        """Return the variables that show only its devices to a replica."""
        if self._nodes[node].spec.kind == "cpu":
            return cpu_variables(len(slots))
        row = self.gpus[node]
        return {
            **gpu_variables(len(slots)),
            **self._order,
            VISIBLE: ",".join(row[slot] for slot in slots),
        }


def marks(state_dir: str, key: ReplicaKey) -> dict[str, str]:
    """Return the variables that identify the processes of one replica."""
    return {
        STATE_DIR: state_dir,
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
