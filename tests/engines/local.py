"""The suite's nodes as virtual nodes of this machine."""

from __future__ import annotations

from pipollux_sched.backend.local.engine import LocalEngine
from pipollux_sched.spec.cluster import ClusterSpec
from tests.sched.backends import cpu_nodes

from .case import NODES, SLOTS, EngineCase


class LocalCase(EngineCase):
    """Replicas are processes of this machine, with torchrun's own agent."""

    refused = (({"image": "train:1"}, "image: 'train:1' cannot be run by the local"),)

    def make(self) -> LocalEngine:
        nodes = tuple(cpu_nodes(**dict.fromkeys(NODES, SLOTS)))
        return LocalEngine(ClusterSpec(nodes=nodes), self.state_dir)
