"""Who holds which slots of which node, as the store tells it: also when no scheduler runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from . import JobRecord, NodeRecord


@dataclass(frozen=True)
class Holding:
    """One replica of a job on a node."""

    job: str
    num_stages: int
    """K: as many of the node's slots are its."""


@dataclass(frozen=True)
class NodeOccupancy:
    """One node, and the replicas that it holds."""

    node: NodeRecord
    replicas: tuple[Holding, ...]

    @property
    def used(self) -> int:
        """Slots that replicas hold."""
        return sum(replica.num_stages for replica in self.replicas)

    @property
    def free(self) -> int:
        """Slots that none holds; 0 where a node has become smaller than what it holds."""
        return max(self.node.slots - self.used, 0)

    @property
    def jobs(self) -> dict[str, int]:
        """Slots held, by job."""
        slots: dict[str, int] = {}
        for replica in self.replicas:
            slots[replica.job] = slots.get(replica.job, 0) + replica.num_stages
        return slots


def occupancy(
    nodes: Mapping[str, NodeRecord], jobs: Iterable[JobRecord]
) -> dict[str, NodeOccupancy]:
    """Return which jobs hold the slots of every node.

    A replica holds its slots from its start until its process has ended; one that was promised
    slots and is yet to be started holds those.

    Args:
        nodes: the nodes served, by name.
        jobs: all jobs; replicas on nodes that are no longer there are left out.
    """
    held: dict[str, list[Holding]] = {name: [] for name in nodes}
    for job in jobs:
        where, num_stages = holding(job)
        for node in where:
            if node in held:
                held[node].append(Holding(job.name, num_stages))
    return {name: NodeOccupancy(node, tuple(held[name])) for name, node in nodes.items()}


def holding(job: JobRecord) -> tuple[tuple[str, ...], int]:
    """Return the node of each replica that a job holds slots for, and K of these replicas."""
    state = job.state
    own = int(job.spec.get("num_stages", 1))
    if state.running_on:
        return state.running_on, state.running_stages or own
    return state.assigned, state.num_stages or own
