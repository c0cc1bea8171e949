"""An allocation: the node of every replica of a job, and the configuration that goes with it.

It is a list of node names, as AdaptDL's allocations are, and compares as one. A different number of
stages on the same nodes shows in `num_stages` only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipollux_perfmodel import Configuration, SpeedupFunction

from .job_info import JobInfo, NodeInfo, ReplicaShape


class Allocation(list[Any]):
    """One node name per replica, and how the job runs on them.

    Args:
        nodes: the node of each replica.
        shape: of its replicas; None for a queued job.

    Example:
        >>> shape = ReplicaShape(2, {"slots": 2}, lambda nodes, replicas: replicas)
        >>> allocation = Allocation(["a", "a", "b"], shape)
        >>> allocation == ["a", "a", "b"], allocation.num_stages
        (True, 2)
    """

    def __init__(self, nodes: Iterable[Any] = (), shape: ReplicaShape | None = None) -> None:
        super().__init__(nodes)
        self.shape = shape

    @property
    def num_stages(self) -> int | None:
        """K; None where nothing is allocated."""
        return self.shape.num_stages if self and self.shape else None

    @property
    def configuration(self) -> Configuration | None:
        """K, R, M, atomic batch size and accumulation steps that the model chooses here.

        None where nothing is allocated, or the job's speedups come from no goodput model.
        """
        if not self or self.shape is None:
            return None
        if not isinstance(self.shape.speedup_fn, SpeedupFunction):
            return None
        return self.shape.speedup_fn.configuration(len(set(self)), len(self))

    @property
    def speedup(self) -> float:
        """Speedup over one replica of the job's own shape; 0.0 where nothing is allocated."""
        if not self or self.shape is None:
            return 0.0
        return float(self.shape.speedup_fn(len(set(self)), len(self)))


def shape_of(
    job: JobInfo, allocation: Sequence[Any], nodes: Mapping[Any, NodeInfo]
) -> ReplicaShape:
    """Return the shape that a job runs in on an allocation.

    An allocation without a number of stages is taken to have the job's own shape, or, where that is
    for other GPUs, the first shape that fits its nodes' GPUs.
    """
    if not job.shapes:
        return job.all_shapes[0]
    stages = getattr(allocation, "num_stages", None)
    where = [nodes[name] for name in allocation if name in nodes]
    fitting = [s for s in job.all_shapes if all(s.runs_on(node) for node in where)]
    same = [s for s in fitting if s.num_stages == stages]
    return [*same, *fitting, job.all_shapes[0]][0]


def runs_as(allocation: Sequence[Any], shape: ReplicaShape) -> bool:
    """Tell whether an allocation has so many stages, or does not say how many it has.

    With the shape that `shape_of` says it is False for a job that has its shape no more.
    """
    return getattr(allocation, "num_stages", None) in (None, shape.num_stages)


def as_allocation(job: JobInfo, held: Sequence[Any], nodes: Mapping[Any, NodeInfo]) -> Allocation:
    """Return what a job holds with the shape that it runs in."""
    return Allocation(held, shape_of(job, held, nodes) if held else None)


def is_first_choice(job: JobInfo, shape: ReplicaShape, gpu_type: str) -> bool:
    """Tell whether a job's replicas of this number of stages have this shape on a type of GPU.

    Of several shapes with the same number of stages that run there, the first counts, as in
    `shape_of`: an allocation says its number of stages, not which of the shapes is meant.
    """
    for other in job.all_shapes:
        if other.num_stages == shape.num_stages and other.gpu_type in (None, gpu_type):
            return other is shape
    return False
