"""The nodes of allocations as nodes of the cluster, and their condition."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping

from pipollux_sched.backend.base import Node
from pipollux_sched.spec.cluster import NodeSpec

from .output import NodeLine, Share
from .snapshot import SlurmSnapshot

ANSWER_PATIENCE = 30.0
"""Seconds without an answer of a node after which nothing new starts there. Its replicas are not
lost until Slurm reports the node as down: a restarting slurmd does not answer either."""
_DOWN = frozenset(
    ("DOWN", "ERROR", "FUTURE", "INVAL", "INVALID_REG", "POWERED_DOWN", "POWERING_DOWN")
)
_DRAINING = frozenset(
    (
        *("DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "POWER_DOWN"),
        *("REBOOT_REQUESTED", "REBOOT_ISSUED", "REBOOT"),
    )
)
_SLICE = re.compile(r"\d+g\.\d+gb", re.IGNORECASE)
"""The size of a MIG slice in the name of a GRES type, as in a100_1g.5gb."""
_SILENT = frozenset(("NOT_RESPONDING", "UNKNOWN", "NO_RESPOND"))


class NodeStates:
    """Derives nodes from snapshots."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._silent_since: dict[str, float] = {}

    def nodes(
        self, snapshot: SlurmSnapshot, draining: Mapping[str, str], broken: Mapping[str, str]
    ) -> dict[str, Node]:
        """Return the nodes by name.

        `draining` has the nodes that will be released soon, `broken` those that nothing can run on,
        each with the reason.
        """
        found = {}
        levels = next(iter(snapshot.topology.values()), {})
        unknown = dict.fromkeys(levels, "")
        for allocation in snapshot.allocations.values():
            for name, share in allocation.shares.items():
                line = snapshot.nodes.get(name)
                leaving = draining.get(name, "")
                where = snapshot.topology.get(name, unknown)
                found[name] = self._node(name, share, line, leaving, broken.get(name, ""), where)
        for name in self._silent_since.keys() - found.keys():
            del self._silent_since[name]
        return found

    def _node(
        self,
        name: str,
        share: Share,
        line: NodeLine | None,
        leaving: str,
        broken: str,
        topology: Mapping[str, str],
    ) -> Node:
        spec = node_spec(name, share, line, topology)
        down = why_down(line)
        if down or broken:
            return Node(spec, ready=False, reason=down or broken)
        reason = self._why_draining(name, line) or leaving
        return Node(spec, draining=bool(reason), reason=reason)

    def _why_draining(self, name: str, line: NodeLine | None) -> str:
        if line is None:
            return ""
        drained = sorted(line.flags & _DRAINING)
        if drained:
            return drained[0] + (f", {line.reason}" if line.reason else "")
        if not line.flags & _SILENT:
            self._silent_since.pop(name, None)
            return ""
        now = self._clock()
        if now - self._silent_since.setdefault(name, now) < ANSWER_PATIENCE:
            return ""
        return "it does not answer"


def is_silent(line: NodeLine | None) -> bool:
    """Return whether a node does not answer."""
    return line is not None and bool(line.flags & _SILENT)


def is_unknown(line: NodeLine | None) -> bool:
    """Return whether Slurm's controller, just started, does not know the state of a node yet.

    For some seconds it rejects every step there ("Memory required by task is not available").
    """
    return line is not None and "UNKNOWN" in line.flags


def why_down(line: NodeLine | None) -> str:
    """Return in Slurm's words why a node is down; empty if it is not."""
    down = sorted(line.flags & _DOWN) if line is not None else []
    if line is None or not down:
        return ""
    return down[0] + (f", {line.reason}" if line.reason else "")


def node_spec(
    name: str, share: Share, line: NodeLine | None, topology: Mapping[str, str] | None = None
) -> NodeSpec:
    """Describe an allocation's share of a node: its GPUs as slots, or its CPUs if it has none.

    Example:
        >>> share = Share(nodes="n1", cpus=16, memory=0, gpus=4, gpu_type=None)
        >>> node_spec("n1", share, None).slots
        4
    """
    memory = share.memory or (line.memory if line is not None else 0)
    return NodeSpec(
        name=name,
        slots=share.gpus or max(share.cpus, 1),
        kind="gpu" if share.gpus else "cpu",
        cpus=max(share.cpus, 1),
        memory=memory or None,
        gpu_type=share.gpu_type,
        single_stage=bool(share.gpu_type and _SLICE.search(share.gpu_type)),
        topology=dict(topology or {}),
    )
