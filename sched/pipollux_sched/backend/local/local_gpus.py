"""The virtual nodes with the present state of their GPUs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipollux_sched.backend.base import Node, ReplicaKey, SlotDevice
from pipollux_sched.spec.cluster import ClusterSpec
from pipollux_sched.store import StateDir

from .cluster_file import VirtualNodes
from .environment import STATE_DIR
from .gpus import monitor, slots
from .gpus.monitor import DeviceState, GpuMonitor
from .gpus.probe_process import GpuProbe
from .gpus.state import GpuReading
from .hardware import VISIBLE, Inventory, find_gpus

_LOG = logging.getLogger(__name__)


class LocalGpus:
    """The virtual nodes, and the GPUs of their slots.

    GPUs are watched if their driver can be asked. Arguments and errors: see `VirtualNodes`;
    `interval`: seconds between two readings, None: `monitor.INTERVAL`.
    """

    def __init__(
        self,
        cluster: ClusterSpec | Path,
        state_dir: StateDir,
        *,
        probe: GpuProbe | None = None,
        interval: float | None = None,
    ) -> None:
        self._probe = probe or GpuProbe()
        self._monitor: GpuMonitor | None = None
        self._first: GpuReading | None = None
        self._held: dict[ReplicaKey, frozenset[str]] = {}
        self._shown: tuple[Mapping[str, Node], Mapping[str, DeviceState] | None] | None = None
        self._present: Mapping[str, Node] = {}
        self._place = str(state_dir.path)
        self._interval = monitor.INTERVAL if interval is None else interval
        try:
            self._nodes = VirtualNodes(cluster, state_dir.path / slots.FILE_NAME, self._inventory)
            self._watch()
        except BaseException:
            self._probe.close()
            raise

    def nodes(self) -> Mapping[str, Node]:
        """Return the nodes; slots on whose GPUs nothing must be started are left out."""
        nodes = self._nodes.nodes()
        self._watch()
        if self._monitor is None:
            return nodes
        self._monitor.wanted = self._wanted()
        states = self._monitor.states
        if self._shown is None or self._shown[0] is not nodes or self._shown[1] is not states:
            self._shown = nodes, states
            before, self._present = self._present, self._with_states(nodes, states)
            _tell_changes(before, self._present)
        return self._present

    def devices(self) -> Mapping[str, Sequence[SlotDevice]]:
        """Return the GPUs of the slots, by node; empty if the driver cannot be asked."""
        if self._monitor is None:
            return {}
        states = self._monitor.states
        return {
            name: [_device(slot, uuid, states.get(uuid)) for slot, uuid in enumerate(row)]
            for name, row in self._nodes.devices.gpus.items()
        }

    def variables(self, node: str, numbers: Sequence[int]) -> dict[str, str]:
        """Return the variables that show only its devices to a replica: see `Devices.of`."""
        return self._nodes.devices.of(node, numbers)

    def hold(self, key: ReplicaKey, variables: Mapping[str, str]) -> None:
        """Record the GPUs of a replica, from its variables."""
        self._held[key] = frozenset(filter(None, variables.get(VISIBLE, "").split(",")))
        self._publish_held()

    def keep_held(self, running: Collection[ReplicaKey]) -> None:
        """Forget the GPUs of replicas that do not run any more."""
        if not self._held.keys() <= set(running):
            self._held = {key: held for key, held in self._held.items() if key in running}
            self._publish_held()

    def close(self) -> None:
        """End the watch."""
        if self._monitor is not None:
            self._monitor.stop()

    def _watch(self) -> None:
        """Begin to watch the GPUs once there are GPU nodes, and their driver can be asked."""
        if self._monitor is not None:
            return
        if self._first is None:
            self._probe.close()
            return
        self._monitor = GpuMonitor(
            self._probe,
            self._wanted(),
            lambda environment: environment.get(STATE_DIR) == self._place,
            interval=self._interval,
        )
        self._publish_held()
        self._monitor.start(self._first)

    def _publish_held(self) -> None:
        if self._monitor is not None:
            self._monitor.held = frozenset().union(*self._held.values())

    def _inventory(self) -> Inventory:
        if self._monitor is not None:  # this thread must not wait for the driver
            gpus = self._monitor.gpus
            return Inventory(gpus, reading=GpuReading(gpus=gpus, error=self._monitor.error))
        found = find_gpus(self._probe)
        self._first = found.reading
        return found

    def _wanted(self) -> frozenset[str]:
        return frozenset(uuid for row in self._nodes.devices.gpus.values() for uuid in row)

    def _with_states(
        self, nodes: Mapping[str, Node], states: Mapping[str, DeviceState]
    ) -> dict[str, Node]:
        found = {}
        for name, node in nodes.items():
            devices = [
                _device(slot, uuid, states.get(uuid))
                for slot, uuid in enumerate(self._nodes.devices.gpus.get(name, ()))
            ]
            left_out = {one.slot: describe(one) for one in devices if one.problem}
            found[name] = replace(node, left_out=left_out)
        return found


def describe(device: SlotDevice) -> str:
    """Return why a slot is left out, with its GPU.

    Example:
        >>> describe(SlotDevice(slot=2, id="GPU-0123456789", index=5, problem="it is lost"))
        'GPU 5 (GPU-01234567): it is lost'
    """
    kind, _, number = device.id.partition("-")
    index = "" if device.index is None else f" {device.index}"
    where = f"MIG slice of GPU{index}" if kind == "MIG" else f"GPU{index}"
    return f"{where} ({kind}-{number[:8]}): {device.problem}"


def _device(slot: int, uuid: str, state: DeviceState | None) -> SlotDevice:
    if state is None:  # it has just become a slot
        return SlotDevice(slot=slot, id=uuid, problem="its state was not read yet")
    return SlotDevice(
        slot=slot,
        id=uuid,
        index=state.index,
        name=state.name,
        utilization=state.use.utilization,
        memory_used=state.use.memory_used,
        memory_total=state.use.memory_total,
        problem=state.reason,
    )


def _tell_changes(before: Mapping[str, Node], now: Mapping[str, Node]) -> None:
    for name, node in now.items():
        earlier = before[name].left_out if name in before else {}
        for slot, why in node.left_out.items():
            if earlier.get(slot) != why:
                _LOG.warning("node %s: slot %d is left out. %s", name, slot, why)
        for slot in earlier.keys() - node.left_out.keys():
            _LOG.warning("node %s: slot %d is used again", name, slot)
