"""The nodes of a Ray cluster as nodes for replicas."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from pipollux_sched.backend.base import Node
from pipollux_sched.backend.local.hardware import node_name
from pipollux_sched.spec.cluster import NodeSpec

from .connection import RayNode, Snapshot

SETTLE_TIME = 3.0
"""Seconds for which others must hold resources before these count as taken: Ray's tables of
resources and of placement groups are updated one after the other."""
_ADDRESS = re.compile(r"[\d.]+|.*:.*")
_SPOT = ("ray.io/market-type", "spot")
_GPU_TYPE = "ray.io/accelerator-type"


class NodeTable:
    """Derives nodes from snapshots, and keeps their names.

    Args:
        names: names of nodes by their ids, as an earlier scheduler has used them.
    """

    def __init__(
        self, names: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._names = dict(names)
        self._clock = clock
        self._taken: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        self._nodes: dict[str, Node] = {}
        self._seen: Snapshot | None = None

    def look(self, snapshot: Snapshot, checked: Mapping[str, str]) -> dict[str, Node]:
        """Return the nodes by name; `checked` has why nothing can run on one, if it is checked."""
        if snapshot is not self._seen:
            self._seen = snapshot
            self._name(snapshot.nodes)
            held, found = _held(snapshot), {}
            for key, node in snapshot.nodes.items():
                taken = {what: self._taken_of(key, what, node, held) for what in node.total}
                made = _node(self._names[key], node, taken, checked.get(key, ""))
                if made is not None and key in checked:
                    found[made.spec.name] = made
            self._nodes = dict(sorted(found.items()))
        return self._nodes

    def id_of(self, name: str) -> str | None:
        """Return the id of a live node."""
        return next((key for key, known in self._names.items() if known == name), None)

    def _name(self, nodes: Mapping[str, RayNode]) -> None:
        """Name new nodes; one with the name of another live node gets a part of its id, too."""
        self._names = {key: name for key, name in self._names.items() if key in nodes}
        for key, node in sorted(nodes.items()):
            if key not in self._names:
                name = node_name(node.host if _ADDRESS.fullmatch(node.name) else node.name)
                used = name in self._names.values()
                self._names[key] = f"{name}-{key[:6]}" if used else name

    def _taken_of(
        self, key: str, what: str, node: RayNode, held: Mapping[tuple[str, str], float]
    ) -> float:
        """Return how much of a resource others hold, and have held for a while."""
        now = self._clock()
        found = max(node.total[what] - node.free.get(what, 0.0) - held.get((key, what), 0.0), 0.0)
        recent = [entry for entry in self._taken[key, what] if entry[0] >= now - SETTLE_TIME]
        self._taken[key, what] = [*recent, (now, found)]
        return min(amount for _, amount in self._taken[key, what])


def _held(snapshot: Snapshot) -> dict[tuple[str, str], float]:
    """Return how much our placement groups hold, by node and resource."""
    held: dict[tuple[str, str], float] = defaultdict(float)
    for actor in snapshot.actors.values():
        for what, amount in (actor.bundle or {}).items():
            held[actor.node, what] += amount
    return held


def _node(name: str, node: RayNode, taken: Mapping[str, float], broken: str) -> Node | None:
    """Return a node, or None for one without devices: its GPUs are slots, else its CPUs."""
    on_gpus = node.total.get("GPU", 0) >= 1
    device = "GPU" if on_gpus else "CPU"
    slots = math.floor(node.total.get(device, 0))
    if slots < 1:
        return None

    def left(what: str) -> int:
        return max(math.floor(node.total.get(what, 0) - taken.get(what, 0.0)), 1)

    spec = NodeSpec(
        name=name,
        slots=slots,
        kind="gpu" if on_gpus else "cpu",
        cpus=left("CPU") if on_gpus else None,
        memory=left("memory") if "memory" in node.total else None,
        preemptible=node.labels.get(_SPOT[0]) == _SPOT[1],
        gpu_type=node.labels.get(_GPU_TYPE) if on_gpus else None,
    )
    others = min(math.ceil(taken[device]), slots)
    busy = f"other work of the Ray cluster holds {others} of {slots} {device}s" if others else ""
    reason = broken or ("Ray drains it" if node.draining else busy)
    return Node(spec, others, ready=not broken, draining=node.draining, reason=reason)
