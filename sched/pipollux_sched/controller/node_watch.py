"""Synchronises the store's nodes with the cluster's.

A condition that the cluster has set is reset only by the cluster, and one that an admin has set
only by an admin. A job on a node that is gone, or does not answer, is moved, without blame.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from pipollux_sched.backend import Node, ReplicaGroupManager
from pipollux_sched.lifecycle import Event, JoiningReplicaLost, NodeLost
from pipollux_sched.store import NodeCondition, NodeRecord, Store
from pipollux_sched.store.devices import FRESH

_LOG = logging.getLogger(__name__)


class NodeWatch:
    """Compares the engine's nodes with the store's.

    Args:
        settings: further data of the event that lists the nodes: policy, restart_seconds.
        reconsider: called when the allocator has something new to decide on.
        listed: called with the nodes whenever they have changed.
    """

    def __init__(
        self,
        store: Store,
        backend: ReplicaGroupManager,
        handle: Callable[[str, Event], object],
        *,
        settings: Mapping[str, Any],
        reconsider: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        listed: Callable[[Mapping[str, Node]], None] = lambda _nodes: None,
    ) -> None:
        self._store = store
        self._backend = backend
        self._handle = handle
        self._settings = dict(settings)
        self._reconsider, self._nodes_listed = reconsider, listed
        self._mark = f"{backend.name}: "
        self._listed: dict[str, Any] | None = None
        self._seen: Mapping[str, Node] | None = None
        self._clock = clock
        self._devices: dict[str, list[dict[str, Any]]] | None = None
        self._devices_at = 0.0
        self._moved: set[tuple[str, int, str]] = set()
        """Jobs, attempts and nodes for which a `NodeLost` was sent."""

    def look(self) -> None:
        """Store the changes since the last call; move jobs off lost nodes; retry failures."""
        nodes = self._backend.nodes()
        if nodes != self._seen:
            self._nodes_listed(nodes)
            self._write(nodes)
            self._seen = nodes
        self._keep_devices()
        # A decision from before the loss of a node may be started there afterwards.
        self._move_off({name for name, node in nodes.items() if node.ready})

    def _keep_devices(self) -> None:
        """Store the devices of the slots when they were read again, or have changed hands."""
        devices = {
            name: [{**asdict(device), "job": job} for device, job in row]
            for name, row in self._backend.devices().items()
        }
        now = self._clock()
        if devices != self._devices or (devices and now > self._devices_at + FRESH / 2):
            self._store.devices.keep(devices)
            self._devices, self._devices_at = devices, now

    def _write(self, nodes: Mapping[str, Node]) -> None:
        changed = self._list(nodes)
        known = self._store.nodes()
        for name, node in nodes.items():
            changed |= self._set_condition(known[name], node)
        if changed:
            self._reconsider()

    def _list(self, nodes: Mapping[str, Node]) -> bool:
        specs = {name: node.spec.model_dump(mode="json") for name, node in nodes.items()}
        for name, node in nodes.items():
            specs[name]["slots"] = max(node.slots, 1)  # the record's own number may be 0
        if specs == self._listed:
            return False
        self._store.set_nodes(
            (name, node.slots, node.spec.kind, specs[name]) for name, node in nodes.items()
        )
        described = {
            name: {"slots": node.slots, "kind": node.spec.kind} for name, node in nodes.items()
        }
        self._store.add_event("cluster", {"nodes": described, **self._settings})
        self._listed = specs
        return True

    def _set_condition(self, record: NodeRecord, node: Node) -> bool:
        ours = record.reason.startswith(self._mark)
        if not node.ready:
            wanted = NodeCondition.DEAD
        elif node.draining:
            wanted = NodeCondition.DRAINING
        else:
            wanted = NodeCondition.READY
        if wanted is NodeCondition.READY and not ours:
            return False  # set by an admin
        if wanted is NodeCondition.DRAINING and record.condition is NodeCondition.DEAD and not ours:
            return False
        reason = "" if wanted is NodeCondition.READY else self._mark + (node.reason or wanted.value)
        if (wanted, reason) == (record.condition, record.reason):
            return False
        self._store.set_node_condition(record.name, wanted, reason)
        return wanted is not record.condition

    def _move_off(self, ready: set[str]) -> None:
        running = self._backend.running()
        there = {(name, entry.attempt) for name, entry in running.items()}
        self._moved = {told for told in self._moved if told[:2] in there}
        for name, entry in running.items():
            for node in sorted(set(entry.nodes) - ready):
                if (name, entry.attempt, node) not in self._moved:
                    why = f"Node {node} does not answer, or is no longer in the cluster."
                    self._handle(name, NodeLost(entry.attempt, why, node))
                    self._moved.add((name, entry.attempt, node))
        for name, (attempt, joining) in self._backend.joining().items():
            for replica, node in joining.items():
                if node not in ready:
                    why = f"Node {node} does not answer, or is no longer in the cluster."
                    self._handle(name, JoiningReplicaLost(attempt, replica, why))
