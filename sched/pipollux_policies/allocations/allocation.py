"""Allocations: the node of each replica of a job, and the shape in which the job runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipollux_perfmodel import Configuration, SpeedupFunction
from pipollux_policies.jobs.job_info import JobInfo, NodeInfo, ReplicaShape
from pipollux_policies.jobs.topology import build_topology


class Allocation(list[Any]):
    """One node name per replica, and the shape of the replicas.

    Args:
        nodes: the node of each replica.
        shape: the shape of the replicas; None for a queued job.
        level: the network level at which its nodes meet (`Topology`).

    Example:
        >>> shape = ReplicaShape(2, {"slots": 2}, lambda nodes, replicas: replicas)
        >>> allocation = Allocation(["a", "a", "b"], shape)
        >>> allocation == ["a", "a", "b"], allocation.num_stages
        (True, 2)
    """

    def __init__(
        self, nodes: Iterable[Any] = (), shape: ReplicaShape | None = None, level: int = 1
    ) -> None:
        super().__init__(nodes)
        self.shape = shape
        self.level = level

    @property
    def num_stages(self) -> int | None:
        """K; None for an empty allocation."""
        return self.shape.num_stages if self and self.shape else None

    @property
    def configuration(self) -> Configuration | None:
        """The configuration that the goodput model chooses; None if empty, or without a model."""
        if not self or self.shape is None:
            return None
        speedup_fn = self.shape.speedup_at(self.level)
        if not isinstance(speedup_fn, SpeedupFunction):
            return None
        return speedup_fn.configuration(len(set(self)), len(self))

    @property
    def speedup(self) -> float:
        """Speedup over one replica of the job's own shape; 0.0 for an empty allocation."""
        if not self or self.shape is None:
            return 0.0
        return float(self.shape.speedup_at(self.level)(len(set(self)), len(self)))


def shape_of(
    job: JobInfo, allocation: Sequence[Any], nodes: Mapping[Any, NodeInfo]
) -> ReplicaShape:
    """Return the shape in which a job runs on an allocation. Without a number of stages, the job's
    own shape, or else the first that fits its nodes' GPUs.
    """
    if not job.shapes:
        return job.all_shapes[0]
    stages = getattr(allocation, "num_stages", None)
    where = [nodes[name] for name in allocation if name in nodes]
    fitting = [s for s in job.all_shapes if all(s.runs_on(node) for node in where)]
    same = [s for s in fitting if s.num_stages == stages]
    return [*same, *fitting, job.all_shapes[0]][0]


def runs_as(allocation: Sequence[Any], shape: ReplicaShape) -> bool:
    """Return whether an allocation has the shape's number of stages, or does not specify any. With
    the result of `shape_of`, it is False if the job no longer has the shape in which it runs.
    """
    return getattr(allocation, "num_stages", None) in (None, shape.num_stages)


def as_allocation(job: JobInfo, held: Sequence[Any], nodes: Mapping[Any, NodeInfo]) -> Allocation:
    """Return a job's current allocation with its shape and network level."""
    if not held:
        return Allocation(held)
    return Allocation(held, shape_of(job, held, nodes), network_level(held, nodes))


def network_level(held: Iterable[Any], nodes: Mapping[Any, NodeInfo]) -> int:
    """Return the network level at which nodes meet, 1 for one node; missing ones do not count."""
    there = [nodes[name] for name in dict.fromkeys(held) if name in nodes]
    if len(there) < 2 or not any(node.topology for node in there):
        return 1
    return build_topology(there).level(range(len(there)))


def is_first_choice(job: JobInfo, shape: ReplicaShape, gpu_type: str) -> bool:
    """Return whether this is the job's first shape with its number of stages on a GPU type. An
    allocation records a number of stages, so only the first such shape counts (`shape_of`).
    """
    for other in job.all_shapes:
        if other.num_stages == shape.num_stages and other.gpu_type in (None, gpu_type):
            return other is shape
    return False
