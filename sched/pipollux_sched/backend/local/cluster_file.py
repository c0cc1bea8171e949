"""The virtual nodes of this machine, reloaded whenever the cluster file changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipollux_sched.backend.base import BackendError, Node
from pipollux_sched.spec.cluster import ClusterSpec, NodeSpec, load_cluster
from pipollux_sched.spec.job import SpecError

from .environment import Devices
from .gpus import slots
from .hardware import Inventory, find_gpus, is_slice, usable_gpus

_LOG = logging.getLogger(__name__)


class VirtualNodes:
    """The nodes of a cluster file, or of a fixed cluster.

    A file that becomes invalid, or would move the GPUs of a node to another one, is ignored: jobs
    may run on them. At first it is a `SpecError`, or `BackendError` if the machine has fewer GPUs.

    Args:
        cluster: the nodes, or the path of their file.
        table: the file that has the GPU of each slot; None: it is not kept.
        inventory: returns the GPUs of this machine.
    """

    def __init__(
        self,
        cluster: ClusterSpec | Path,
        table: Path | None = None,
        inventory: Callable[[], Inventory] = find_gpus,
    ) -> None:
        self._file = cluster if isinstance(cluster, Path) else None
        self._table = table
        self._inventory = inventory
        self._signature = self._sign()
        saved = {} if table is None else slots.load(table)
        self._nodes, self.devices = self._read(cluster, saved)
        self._keep(self.devices)

    def nodes(self) -> Mapping[str, Node]:
        """Return the nodes by name."""
        signature = self._sign()
        if self._file is not None and signature != self._signature:
            self._signature = signature
            self._read_again(self._file)
        return self._nodes

    def _read_again(self, file: Path) -> None:
        try:
            nodes, devices = self._read(file, self.devices.gpus)
        except (SpecError, BackendError) as error:
            _LOG.warning("the nodes stay as they are: %s", error)
            return
        moved = self.devices.moved(devices)
        if moved:
            _LOG.warning(
                "the nodes stay as they are until the scheduler is started again: %s would give "
                "GPUs of %s to others; add nodes at its end",
                file,
                ", ".join(moved),
            )
            return
        try:
            self._keep(devices)
        except OSError as error:
            _LOG.warning("the nodes stay as they are: %s", error)
            return
        self._nodes, self.devices = nodes, devices

    def _read(
        self, cluster: ClusterSpec | Path, saved: Mapping[str, Sequence[str]]
    ) -> tuple[dict[str, Node], Devices]:
        found = load_cluster(cluster) if isinstance(cluster, Path) else cluster
        wanted = {node.name: node.slots for node in found.placed_nodes if node.kind == "gpu"}
        if not wanted:
            nodes = {node.name: Node(node) for node in found.placed_nodes}
            return nodes, Devices(nodes, {})
        inventory = self._inventory()
        usable = usable_gpus(inventory)
        barred = {uuid for gpu in inventory.gpus for uuid, _ in gpu.devices()} - {*usable}
        rows = slots.assign(saved, wanted, usable, barred)
        _check_enough(wanted, rows, usable, inventory)
        nodes = {
            node.name: _with_gpus(node, rows.get(node.name, ())) for node in found.placed_nodes
        }
        return nodes, Devices(nodes, rows, in_pci_order=inventory.in_pci_order)

    def _keep(self, devices: Devices) -> None:
        if self._table is not None and devices.gpus:
            slots.save(self._table, devices.gpus)

    def _sign(self) -> tuple[int, int] | None:
        try:
            stat = os.stat(self._file) if self._file is not None else None
        except OSError:
            return None
        return None if stat is None else (stat.st_mtime_ns, stat.st_ino)


def _check_enough(
    wanted: Mapping[str, int],
    rows: Mapping[str, Sequence[str]],
    usable: Sequence[str],
    inventory: Inventory,
) -> None:
    """Reject GPU nodes with more GPUs than this machine has: every job on them would fail."""
    if all(len(rows[name]) >= slots for name, slots in wanted.items()):
        return
    if inventory.error:
        raise BackendError(
            f"the nodes {', '.join(wanted)} have slots of kind gpu, and the driver of this machine "
            f"does not list its GPUs: {inventory.error}; repair it, or give them kind: cpu"
        )
    raise BackendError(
        f"the nodes {', '.join(wanted)} have {sum(wanted.values())} slots of kind gpu together, "
        f"and this machine has {len(usable)} GPUs that may be used; give them fewer slots, or "
        "kind: cpu"
    )


def _with_gpus(spec: NodeSpec, row: Sequence[str]) -> Node:
    """Return a node with a slot for each of its GPUs; MIG slices hold single stages only."""
    if spec.kind != "gpu":
        return Node(spec)
    found = {"slots": len(row), "single_stage": spec.single_stage or any(map(is_slice, row))}
    return Node(spec.model_copy(update=found))
