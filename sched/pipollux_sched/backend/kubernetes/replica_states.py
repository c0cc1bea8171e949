"""The states of all replicas, from their pods and nodes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from pipollux_sched.backend.base import ReplicaKey, ReplicaState

from .informer import Derived, Informer
from .node_state import ClusterNode
from .pod_state import PodView, replica_state

__all__ = ["ReplicaStates"]

ABSENCE = 15.0
"""Seconds after which a missing node counts as gone: its own watch may be late."""


class _Judged(NamedTuple):
    pod: PodView
    node: ClusterNode | None
    ordered: bool
    state: ReplicaState

    def holds(self, pod: PodView, node: ClusterNode | None, *, ordered: bool) -> bool:
        return self.pod is pod and self.node is node and self.ordered == ordered


class ReplicaStates:
    """The states of replicas, recomputed after changes."""

    def __init__(self, pods: Informer[PodView], nodes: Informer[ClusterNode]) -> None:
        self._pods, self._nodes = pods, nodes
        self.ordered: set[ReplicaKey] = set()
        """The replicas that this scheduler has signalled to stop or end."""
        self._changes = 0
        self._absent: dict[str, float] = {}
        """Missing nodes of pods, and since when they are missing."""
        self._known: dict[str, _Judged] = {}
        """Cached states by pod name, except states that depend on the time."""
        self._made = Derived([nodes, pods, self], self._make)

    @property
    def changes(self) -> int:
        """Grows with every change that no mirror shows."""
        return self._changes

    def check(self) -> None:
        """Count a change while the node of a replica is missing: states then depend on time."""
        if self._absent:
            self._changes += 1

    def all(self) -> list[tuple[PodView, ReplicaState]]:
        """Return all our pods, each with the state of its replica."""
        return self._made.get()

    def of(self, pod: PodView) -> ReplicaState:
        """Return the state of the replica of a pod."""
        node = self._nodes.find(("", pod.node)) if pod.node else None
        return self._state(pod, node, ordered=pod.key in self.ordered)

    def order(self, keys: Iterable[ReplicaKey]) -> None:
        """Record that this scheduler signals replicas to stop or end."""
        self.ordered.update(keys)
        self._changes += 1

    def forget(self, key: ReplicaKey) -> None:
        """Forget the signals of a replica."""
        if key in self.ordered:
            self.ordered.discard(key)
            self._changes += 1

    def _make(self) -> list[tuple[PodView, ReplicaState]]:
        nodes = {view.object_name: view for view in self._nodes.values()}
        pods = self._pods.values()
        absent = {pod.node for pod in pods if pod.node} - nodes.keys()
        self._absent = {name: at for name, at in self._absent.items() if name in absent}
        known, self._known = self._known, {}
        states = []
        for pod in pods:
            node, ordered = nodes.get(pod.node), pod.key in self.ordered
            last = known.get(pod.name)
            # Of ten thousand states, few change between two listings.
            if last is None or not last.holds(pod, node, ordered=ordered):
                last = _Judged(pod, node, ordered, self._state(pod, node, ordered=ordered))
            if pod.node not in absent:
                self._known[pod.name] = last
            states.append((pod, last.state))
        return states

    def _state(self, pod: PodView, node: ClusterNode | None, *, ordered: bool) -> ReplicaState:
        gone = bool(pod.node) and node is None and self._is_gone(pod.node)
        return replica_state(pod, node, gone=gone, ordered=ordered)

    def _is_gone(self, node: str) -> bool:
        now = time.monotonic()
        return now - self._absent.setdefault(node, now) >= ABSENCE
