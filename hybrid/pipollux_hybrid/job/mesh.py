"""The processes of a job as a mesh: replicas one way, stages the other.

Where each stage has a process of its own, R replicas of K stages are R·K processes::

                 stage 0   stage 1          gradients and buffers: down a column
    replica 0       0         1             micro-batches: along a row
    replica 1       2         3             what all agree on: everybody

With one process to a replica there is one column, and no rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .env import JobEnvironment
from .groups import ReplicaGroup
from .peers import lost_peers

__all__ = ["ProcessMesh"]


class ProcessMesh:
    """The groups of this process; all processes make it at the same place.

    Args:
        env: Who this process is.
        timeout: Seconds to wait for slow peers.
    """

    def __init__(self, env: JobEnvironment, timeout: float) -> None:
        ranks = torch.arange(env.world_size).view(env.num_replicas, env.processes_per_replica)
        wait = timedelta(seconds=timeout)
        self._ranks, self._wait = ranks, wait
        columns, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=wait)
        rows, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=wait)
        kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
        self.device_mesh = DeviceMesh.from_group(
            [columns, rows], kind, mesh=ranks, mesh_dim_names=("replica", "stage")
        )
        """torch's own mesh of (replica, stage)."""
        self.replicas: dist.ProcessGroup = self.device_mesh.get_group("replica")
        """The processes that run this stage, in the order of replicas."""
        self.stages: dist.ProcessGroup = self.device_mesh.get_group("stage")
        """The processes of this replica, in the order of stages."""
        row, column = self.stages, self.replicas
        if kind == "cuda":  # NCCL carries nothing from the CPU
            column, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), wait, "gloo")
            row, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), wait, "gloo")
        self._row = ReplicaGroup(row, env.processes_per_replica)
        self.column = ReplicaGroup(column, env.num_replicas)
        """The same processes as those of :attr:`replicas`, for tensors on the CPU."""

    def among(self, stages: Sequence[int]) -> dist.ProcessGroup | None:
        """Return a group of some stages of this replica, in that order; None: this is another one.

        All processes of the job call it at the same place.
        """
        rows = self._ranks[:, list(stages)].tolist()
        group: dist.ProcessGroup | None
        group, _ = dist.new_subgroups_by_enumeration(rows, timeout=self._wait)
        return group

    def sum_over_stages(self, numbers: Sequence[float]) -> list[float]:
        """Add numbers up over the stages of this replica, whose processes all call it.

        Raises:
            PeerLostError: A process is gone.
        """
        return _sum(self._row, numbers)

    def sum_over_replicas(self, numbers: Sequence[float]) -> list[float]:
        """Add numbers up over the processes that run this stage, all of which call it.

        Raises:
            PeerLostError: A process is gone.
        """
        return _sum(self.column, numbers)

    def gather_from_stages(self, content: bytes) -> list[bytes]:
        """Return bytes of each stage of this replica, whose processes all call it.

        Raises:
            PeerLostError: A process is gone.
        """
        with _reaching_peers():
            return self._row.all_gather_bytes(content)


def _sum(group: ReplicaGroup, numbers: Sequence[float]) -> list[float]:
    vector = torch.tensor(list(numbers), dtype=torch.float64)
    with _reaching_peers():
        group.all_reduce(vector)
    return [float(x) for x in vector.tolist()]


@contextmanager
def _reaching_peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise lost_peers("while telling other stages and replicas of the step", error) from error
