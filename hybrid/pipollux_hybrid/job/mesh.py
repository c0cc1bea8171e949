"""The processes of a job as a mesh of replicas and stages.

In a multi-process pipeline R replicas of K stages are R·K processes::

                 stage 0   stage 1          gradients and buffers: down a column
    replica 0       0         1             micro-batches: along a row
    replica 1       2         3             control messages: all processes

With one process per replica there is one column, and no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipollux_hybrid.errors import PeerLostError

from .connections import new_connections
from .env import JobEnvironment
from .groups import ReplicaGroup, carries_device, make_known
from .peers import broken_replica, lost_peers
from .replica_calls import ReplicaCalls

Stages = tuple[int, ...]
"""Some stages of a replica, ascending."""


@dataclass(frozen=True, kw_only=True)
class MeshGroups:
    """The groups of one process in a mesh that replicas have formed during training."""

    column: ReplicaGroup
    row: ReplicaGroup
    among: Mapping[Stages, ReplicaGroup]
    """The groups of some stages of this replica that include this process."""

    @property
    def all(self) -> tuple[ReplicaGroup, ...]:
        """All groups."""
        return (self.column, self.row, *self.among.values())

    @property
    def within(self) -> set[str]:
        """Names of the connections within this replica."""
        return {name for group in (self.row, *self.among.values()) for name in group.connections}


class ProcessMesh:
    """The groups of this process; all processes create it at the same point.

    At an elastic resize it switches to new groups, and users of one of its groups must fetch the
    new one. All processes of a group call its collectives, which raise a PeerLostError if one is
    gone, within a replica a ReplicaBrokenError.
    """

    def __init__(self, env: JobEnvironment, timeout: float) -> None:
        self.num_stages, self.stage = env.processes_per_replica, env.stage
        wait = timedelta(seconds=timeout)
        self._wait = wait
        self._ranks = self._all_ranks(env.num_replicas)
        columns, rows = self._ranks.T.tolist(), self._ranks.tolist()
        self.replicas: dist.ProcessGroup
        """The processes that run this stage, in the order of replicas."""
        self.stages: dist.ProcessGroup
        """The processes of this replica, in the order of stages."""
        self.replicas, _ = dist.new_subgroups_by_enumeration(columns, timeout=wait)
        separate = carries_device()  # and nothing from the CPU
        with new_connections() as self.within:
            self.stages, _ = dist.new_subgroups_by_enumeration(rows, timeout=wait)
            row = self.stages
            if separate:
                row, _ = dist.new_subgroups_by_enumeration(rows, wait, "gloo")
        """Names of the connections within this replica, so far."""
        column = self.replicas
        if separate:
            column, _ = dist.new_subgroups_by_enumeration(columns, wait, "gloo")
        self.row = ReplicaGroup(row, env.processes_per_replica)
        """:attr:`stages` as a group for tensors on the CPU."""
        self.calls = ReplicaCalls(self.row, self.stage, env.rank)
        self.column = ReplicaGroup(column, env.num_replicas)
        """:attr:`replicas` as a group for tensors on the CPU."""
        self._among: dict[Stages, dist.ProcessGroup | None] = {}

    @property
    def device_mesh(self) -> DeviceMesh:
        """Torch's own mesh of (replica, stage), over the groups of the current replicas."""
        kind = "cuda" if carries_device() else "cpu"
        return DeviceMesh.from_group(
            [self.replicas, self.stages], kind, self._ranks, mesh_dim_names=("replica", "stage")
        )

    def among(self, stages: Stages) -> dist.ProcessGroup | None:
        """Return a group of some stages of this replica, in that order; None: it excludes this one.
        It is cached; all processes of the job make the first call at the same point.
        """
        if stages not in self._among:
            rows = self._ranks[:, list(stages)].tolist()
            made, _ = dist.new_subgroups_by_enumeration(rows, timeout=self._wait)
            self._among[stages] = made
        return self._among[stages]

    def form(
        self,
        form: Callable[[str, int, int], ReplicaGroup],
        form_within: Callable[[str, int, int], ReplicaGroup],
        replica: int,
        num_replicas: int,
    ) -> MeshGroups:
        """Form the groups of another membership, in any thread; all of its processes call it.
        ``form`` and, within a replica, ``form_within`` form a group, given its name, this process's
        rank and the size.
        """
        column = form(f"column-{self.stage}", replica, num_replicas)
        row = form_within(f"row-{replica}", self.stage, self.num_stages)
        among = {
            stages: form_within(
                f"row-{replica}-{'-'.join(map(str, stages))}",
                *(stages.index(self.stage), len(stages)),
            )
            for stages in list(self._among)
            if self.stage in stages
        }
        return MeshGroups(column=column, row=row, among=among)

    def rejoin(self, groups: MeshGroups, replica: int) -> None:
        """Switch to the groups of :meth:`form`; torch's default group is replaced already."""
        self._ranks = self._all_ranks(groups.column.size)
        row = self._ranks[replica].tolist()
        self.column, self.row, self.within = groups.column, groups.row, groups.within
        self.calls = ReplicaCalls(self.row, self.stage, replica)
        self.replicas = make_known(groups.column, self._ranks[:, self.stage].tolist())
        self.stages = make_known(groups.row, row)
        self._among = {
            stages: make_known(groups.among[stages], [row[k] for k in stages])
            if stages in groups.among
            else None
            for stages in self._among
        }

    def _all_ranks(self, num_replicas: int) -> torch.Tensor:
        """Return the ranks of all processes, shape [R, K]."""
        return torch.arange(num_replicas * self.num_stages).view(num_replicas, self.num_stages)

    def sum_over_stages(self, numbers: Sequence[float]) -> list[float]:
        """Sum numbers over the stages of this replica."""
        return _sum(self.row, numbers, broken_replica)

    def share(self, found: torch.Tensor | None, size: int) -> torch.Tensor | None:
        """Return the result, float64 [size], of a process of this replica with one, or None."""
        mine = torch.zeros(1 + size, dtype=torch.float64)
        if found is not None:
            mine[0], mine[1:] = 1.0, found
        with _reaching(broken_replica):
            everyone = self.row.all_gather(mine)
        return next((x[1:] for x in everyone if x[0] > 0.0), None)

    def sum_over_replicas(self, numbers: Sequence[float]) -> list[float]:
        """Sum numbers over the processes that run this stage."""
        return _sum(self.column, numbers, lost_peers)

    def gather_from_stages(self, content: bytes) -> list[bytes]:
        """Return bytes of each stage of this replica."""
        with _reaching(broken_replica):
            return self.row.all_gather_bytes(content)


def _sum(
    group: ReplicaGroup,
    numbers: Sequence[float],
    lost: Callable[[str, BaseException], PeerLostError],
) -> list[float]:
    vector = torch.tensor(list(numbers), dtype=torch.float64)
    with _reaching(lost):
        group.all_reduce(vector)
    return [float(x) for x in vector.tolist()]


@contextmanager
def _reaching(lost: Callable[[str, BaseException], PeerLostError]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise lost("while exchanging results with other stages and replicas", error) from error
