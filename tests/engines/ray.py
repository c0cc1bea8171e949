"""The suite's nodes as raylets of a real Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipollux_sched.backend.ray.engine import RayEngine, RayOptions
from tests.ray.cluster import RayCluster

from .case import SLOTS, EngineCase


class RayCase(EngineCase):
    """Replicas run below actors, with torchrun's own agent."""

    sees_others = True
    refused = (
        ({"image": "train:1"}, "image: 'train:1' cannot be run by the ray"),
        ({"run_as": "alice"}, "run_as: 'alice' is of no use with the ray"),
    )

    def __init__(self, folder: Path, cluster: RayCluster) -> None:
        super().__init__(folder)
        self._cluster = cluster

    def make(self) -> RayEngine:
        return RayEngine(self.state_dir, RayOptions(self._cluster.address, interval=0.2))

    def take_away(self, handle: str) -> None:
        namespace = "pipollux-" + self.state_dir.identity("ray")
        self._cluster.call("end_actor", handle, namespace)

    @contextmanager
    def occupy(self, node: str, slots: int = SLOTS) -> Iterator[None]:
        self._cluster.call("occupy", node, num_cpus=slots)
        yield
        self._cluster.call("release", node)

    def close(self) -> None:
        super().close()
        namespace = "pipollux-" + self.state_dir.identity("ray")
        assert [x for x in self._cluster.call("actors") if x["namespace"] == namespace] == []
        assert [x for x in self._cluster.call("groups") if x.startswith(namespace)] == []
