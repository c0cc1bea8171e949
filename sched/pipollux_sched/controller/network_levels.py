"""The network levels of running jobs, by the present labels of their nodes."""

from __future__ import annotations

from collections.abc import Mapping

from pipollux_sched.backend.base import Node, network_level

_MOST_KNOWN = 10_000


class NetworkLevels:
    """Finds the levels of jobs, each once for the same nodes and labels."""

    def __init__(self) -> None:
        self._state: tuple[Mapping[str, Node], dict[tuple[str, ...], int]] = ({}, {})
        """Nodes with labels, and known levels; replaced together by another thread."""

    def update(self, nodes: Mapping[str, Node]) -> None:
        """Take the present nodes of the cluster."""
        labelled = any(node.spec.topology for node in nodes.values())
        self._state = (nodes if labelled else {}), {}

    def of(self, names: tuple[str, ...]) -> int | None:
        """Return the level at which nodes meet; None in a cluster without levels."""
        nodes, known = self._state
        if not nodes:
            return None
        if names not in known:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            known[names] = network_level(nodes, names)
        return known[names]
