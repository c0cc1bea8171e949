"""The suite's nodes as hosts of a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipollux_sched.backend.slurm.engine import SlurmEngine
from pipollux_sched.backend.slurm.pools import OwnAllocation
from tests.hosts.harness.hosts import Hosts
from tests.hosts.harness.slurm import SlurmCluster

from .case import SLOTS, EngineCase


class SlurmCase(EngineCase):
    """Replicas are steps of an allocation of two nodes, with torchrun's own agent."""

    refused = (({"image": "train:1"}, "image: 'train:1' cannot be run by the slurm"),)

    def __init__(self, folder: Path, hosts: Hosts, cluster: SlurmCluster, pool: int) -> None:
        super().__init__(folder)
        self.host, self._cluster, self._pool = hosts.gateway, cluster, pool

    def make(self) -> SlurmEngine:
        return SlurmEngine(self.state_dir, OwnAllocation(self._pool), interval=0.5)

    def take_away(self, handle: str) -> None:
        self._cluster.call("scancel", "--signal=KILL", handle)

    @contextmanager
    def occupy(self, node: str, slots: int = SLOTS) -> Iterator[None]:
        step = ("--exact", f"--nodelist={node}", f"--gres=gpu:{slots}", "--ntasks=1")
        words = ("srun", f"--jobid={self._pool}", "--job-name=theirs", *step, "sleep", "600")
        with self._cluster.start(*words) as process:
            self._cluster.wait_until(lambda: "theirs" in self._steps())
            yield
            process.kill()

    def _steps(self) -> str:
        return self._cluster.call("squeue", "--steps", "--noheader", "--format=%j")
