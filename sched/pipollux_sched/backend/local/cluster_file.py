"""The virtual nodes of this machine, reloaded whenever the cluster file changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from pipollux_sched.backend.base import BackendError, Node
from pipollux_sched.spec.job import ClusterSpec, SpecError, load_cluster

from .environment import Devices
from .hardware import check_gpus

_LOG = logging.getLogger(__name__)


class VirtualNodes:
    """The nodes of a cluster file, or of a fixed cluster.

    A file that becomes invalid, or would move the GPUs of a node to another one, is ignored: jobs
    may run on them. At first it is a `SpecError`, or `BackendError` if the machine has fewer GPUs.
    """

    def __init__(self, cluster: ClusterSpec | Path) -> None:
        self._file = cluster if isinstance(cluster, Path) else None
        self._signature = self._sign()
        self._nodes, self.devices = _read(cluster)

    def nodes(self) -> Mapping[str, Node]:
        """Return the nodes by name."""
        signature = self._sign()
        if self._file is not None and signature != self._signature:
            self._signature = signature
            self._read_again(self._file)
        return self._nodes

    def _read_again(self, file: Path) -> None:
        try:
            nodes, devices = _read(file)
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
        self._nodes, self.devices = nodes, devices

    def _sign(self) -> tuple[int, int] | None:
        try:
            stat = os.stat(self._file) if self._file is not None else None
        except OSError:
            return None
        return None if stat is None else (stat.st_mtime_ns, stat.st_ino)


def _read(cluster: ClusterSpec | Path) -> tuple[dict[str, Node], Devices]:
    found = load_cluster(cluster) if isinstance(cluster, Path) else cluster
    nodes = {node.name: Node(node) for node in found.placed_nodes}
    check_gpus(nodes)
    return nodes, Devices(nodes)
