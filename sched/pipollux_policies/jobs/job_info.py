"""Jobs and nodes as allocation policies see them; names and field order are AdaptDL's.

A job asks for resources per pipeline replica, and a replica's resources lie on ONE node. A policy
therefore sees a replica of K stages as ``{"slots": K, ...}`` and never splits it. The value of an
allocation is one function: the speedup over one replica (Pollux, OSDI'21, §4.2). A job with several
possible numbers of stages, or with type-specific speedups, lists them in `shapes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipollux_perfmodel import SpeedupFunction, speedups_of

from .restart_cost import DEFAULT_RESTART_SECONDS, change_factor

MEASURED_REACH = 4
"""A job may get at most this many times the replicas on which it was measured.

Pollux and AdaptDL use 2. With 4 a job reaches its final size after half the restarts, and can skip
a size that is worse than a smaller and a larger one, such as the first size on two nodes."""
SpeedupCallable: TypeAlias = Callable[[Any, Any], Any]
"""``speedup(num_nodes, num_replicas)``: equal-shaped integer arrays in, array of floats out.

If it has a method ``at_level(level)``, as `SpeedupFunction`, that returns the speedups of
allocations whose nodes meet at a network level."""


@dataclass(frozen=True)
class ReplicaShape:
    """One way to run a replica of a job: a number of stages, and possibly a type of GPU.

    >>> ReplicaShape(4, {"slots": 4}, lambda nodes, replicas: 2.5 * replicas).num_stages
    4
    """

    num_stages: int
    resources: Mapping[str, int]
    """The resources of ONE replica of this shape, on ONE node."""
    speedup_fn: SpeedupCallable
    """Speedup over the SAME base for all shapes of a job: one replica of the job's own shape."""
    gpu_type: str | None = None
    """The only type of GPU for this shape; None: any."""
    max_replicas: int | None = None
    """The most replicas of this shape; None: the job's limit."""

    def __post_init__(self) -> None:
        if self.num_stages < 1:
            raise ValueError(f"num_stages: {self.num_stages} must be at least 1")
        if self.max_replicas is not None and self.max_replicas < 1:
            raise ValueError(f"max_replicas: {self.max_replicas} must be at least 1")
        _check_resources(self.resources)

    @property
    def slots(self) -> int:
        """Slots of one replica, at least 1; `num_stages` if `resources` has no slots."""
        return max(self.resources.get("slots", self.num_stages), 1)

    @cached_property
    def holds(self) -> tuple[str | None, frozenset[tuple[str, int]]]:
        """GPU type and resources; shapes with equal values fit the same nodes."""
        return self.gpu_type, frozenset(self.resources.items())

    def speedup_at(self, level: int) -> SpeedupCallable:
        """Return the speedups of allocations whose nodes meet at a network level (`Topology`)."""
        if level <= 1:
            return self.speedup_fn
        at_level = getattr(self.speedup_fn, "at_level", None)
        found: SpeedupCallable = self.speedup_fn if at_level is None else at_level(level)
        return found

    def steps(self, top: int) -> tuple[int, ...]:
        """Return the network levels below `top` that cost less than the next higher one."""
        if top <= 1:
            return ()
        if isinstance(self.speedup_fn, SpeedupFunction):  # whose functions need not be made
            return tuple(range(1, min(top, self.speedup_fn.num_levels)))
        functions = [self.speedup_at(level) for level in range(1, top + 1)]
        return tuple(
            level for level in range(1, top) if functions[level] is not functions[level - 1]
        )

    def runs_on(self, node: NodeInfo) -> bool:
        """Return whether this shape can run on a node's type of GPU."""
        return self.gpu_type is None or self.gpu_type == node.gpu_type


def find_speedups(
    asked: Iterable[tuple[ReplicaShape, Any, Any, int]],
) -> list[NDArray[np.float64]]:
    """Return the speedups of many jobs, on integers or arrays; missing ones are computed together.
    Each entry has a shape, the numbers of nodes and of replicas, and the network level. Speedups
    that are not a `SpeedupFunction` are computed one by one.
    """
    questions = [
        (shape.speedup_at(level), nodes, replicas) for shape, nodes, replicas, level in asked
    ]
    together = [
        (speedup_fn, nodes, replicas)
        for speedup_fn, nodes, replicas in questions
        if isinstance(speedup_fn, SpeedupFunction)
    ]
    answers = iter(speedups_of(together))
    return [
        next(answers)
        if isinstance(speedup_fn, SpeedupFunction)
        else np.broadcast_to(
            np.asarray(speedup_fn(nodes, replicas), dtype=np.float64), np.shape(replicas)
        )
        for speedup_fn, nodes, replicas in questions
    ]


@dataclass(frozen=True)
class JobInfo:
    """One job, as policies see it; ValueError if a number is out of range.

    >>> JobInfo({"slots": 2}, lambda nodes, replicas: replicas, 0.0, 1, 4).num_stages
    1
    """

    resources: Mapping[str, int]
    """The resources of ONE replica on ONE node: ``{"slots": K, "cpus": …, "memory": bytes}``."""
    speedup_fn: SpeedupCallable
    """Speedup over one replica, vectorised over ``(num_nodes, num_replicas)``."""
    creation_timestamp: datetime | float
    """Time of submission: a time stamp, or seconds since the epoch."""
    min_replicas: int
    """The fewest replicas: the job gets at least this many, or nothing."""
    max_replicas: int
    preemptible: bool = True
    """False: once the job runs, its allocation stays unchanged (it is pinned)."""
    num_stages: int = 1
    """K, the number of stages of a replica; ``resources`` already contains its slots."""
    age: float = 0.0
    """Seconds since submission."""
    num_restarts: int = 0
    restart_seconds: float = DEFAULT_RESTART_SECONDS
    """Seconds without training that one restart costs this job."""
    num_rescales: int = 0
    rescale_seconds: float | None = None
    """Seconds that an elastic resize costs the surviving replicas; None: changes are restarts."""
    gpu_type: str | None = None
    """The only type of GPU that the job's own shape is for; None: any."""
    shapes: tuple[ReplicaShape, ...] = ()
    """Further shapes beside the job's own (`resources`, `num_stages`, `speedup_fn`)."""
    attained_service: float = 0.0
    """Slot-seconds that the job has held so far."""
    remaining_work: float | None = None
    """Seconds that one replica of the job's own shape still trains; None: unknown."""
    work_left: tuple[float, ...] = ()
    """Equally likely values of `remaining_work`, which is then None, for unknown lengths."""
    work_done: float = 0.0
    """Seconds of one-replica training that the job has done, at its present goodput."""
    mean_jobs: float | None = None
    """Average number of unfinished jobs over its life so far, at least 1; None: the present one."""
    allowed_replicas: int | None = None
    """The user's limit, if `max_replicas` is lower until the job is measured on more."""
    family: str = ""
    """Jobs of one family have similar lengths (`lengths`); empty: no family."""
    requested_replicas: int | None = None
    """Number of replicas under policies with fixed sizes; None: `min_replicas`."""
    team: str = ""
    """The team whose quota the job uses; only `teams.TeamPolicy` reads it."""
    priority: int = 0
    """Jobs with higher priority go first if teams are configured."""
    preempts: bool = True

    def __post_init__(self) -> None:
        _check_resources(self.resources)
        if self.max_replicas < 1:
            raise ValueError(f"max_replicas: {self.max_replicas} must be at least 1")
        if not 0 <= self.min_replicas <= self.max_replicas:
            raise ValueError(
                f"min_replicas: {self.min_replicas} must be between 0 and "
                f"max_replicas = {self.max_replicas}"
            )
        for name in (
            *("num_stages", "age", "num_restarts", "restart_seconds"),
            *("num_rescales", "attained_service", "work_done"),
        ):
            least = 1 if name == "num_stages" else 0
            if not getattr(self, name) >= least:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least {least}")
        if self.rescale_seconds is not None and not self.rescale_seconds >= 0:
            raise ValueError(f"rescale_seconds: {self.rescale_seconds} must be at least 0 or None")
        if self.remaining_work is not None and not self.remaining_work >= 0:
            raise ValueError(f"remaining_work: {self.remaining_work} must be at least 0 or None")
        if self.work_left and (self.remaining_work is not None or not min(self.work_left) >= 0):
            raise ValueError(
                f"work_left: {self.work_left} must be values of at least 0, and none where "
                f"remaining_work is known ({self.remaining_work})"
            )
        if self.mean_jobs is not None and not self.mean_jobs >= 1:
            raise ValueError(f"mean_jobs: {self.mean_jobs} must be at least 1 or None")
        for name in ("requested_replicas", "allowed_replicas"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name}: {count} must be at least 1")

    @property
    def likely_work(self) -> tuple[float, ...]:
        """Equally likely values of the remaining work; empty: unknown."""
        return self.work_left if self.remaining_work is None else (self.remaining_work,)

    @property
    def least_replicas(self) -> int:
        """The fewest replicas of the job, at least 1."""
        return max(self.min_replicas, 1)

    @property
    def num_changes(self) -> int:
        """Number of changes of its allocation so far, of both kinds."""
        return self.num_restarts + self.num_rescales

    def change_seconds(self, *, elastic: bool) -> float:
        """Return the seconds without training of one more change; `elastic`: a replica survives."""
        if elastic and self.rescale_seconds is not None:
            return min(self.rescale_seconds, self.restart_seconds)
        return self.restart_seconds

    def change_factor(self, *, elastic: bool) -> float:
        """Return the factor on the job's speedup if its allocation changes now: `restart_cost`."""
        lost = self.num_restarts * self.restart_seconds
        lost += self.num_rescales * self.change_seconds(elastic=True)
        return change_factor(self.age, lost, self.change_seconds(elastic=elastic))

    @property
    def created(self) -> float:
        """`creation_timestamp` in seconds since the epoch."""
        stamp: Any = self.creation_timestamp
        if isinstance(stamp, tuple) and len(stamp) == 1:
            # Some code for AdaptDL has a trailing comma here, which makes a tuple.
            stamp = stamp[0]
        return stamp.timestamp() if isinstance(stamp, datetime) else float(stamp)

    @cached_property
    def all_shapes(self) -> tuple[ReplicaShape, ...]:
        """All shapes of the job, its own first."""
        own = ReplicaShape(self.num_stages, self.resources, self.speedup_fn, self.gpu_type)
        return (own, *self.shapes)

    def most_replicas(self, shape: ReplicaShape) -> int:
        """Return the most replicas that the job may have in a shape."""
        limit = shape.max_replicas
        return self.max_replicas if limit is None else min(limit, self.max_replicas)


@dataclass(frozen=True)
class NodeInfo:
    """One node, as policies see it: the resources for jobs, and its state."""

    resources: Mapping[str, int]
    """Amounts by name, as in `JobInfo.resources`; a missing name is 0."""
    preemptible: bool = False
    """Whether the node may be reclaimed at any time; such nodes are filled last."""
    gpu_type: str = ""
    """Type of its GPUs, as in `ReplicaShape.gpu_type`; empty: unknown."""
    draining: bool = False
    """Whether jobs have to leave it; it accepts no new replicas, and pinned jobs end here."""
    healthy: bool = True
    """False: the node counts as lost; its jobs restart elsewhere."""
    topology: tuple[str, ...] = ()
    """Its domains by network level, the widest first, such as (zone, rack); empty texts where it
    has no label."""

    def num_fitting(self, shape: ReplicaShape) -> int:
        """Return how many replicas of a shape these resources hold; 0 on the wrong type of GPU."""
        if not shape.runs_on(self):
            return 0
        needs = ((kind, need) for kind, need in shape.resources.items() if need)
        return max(min(self.resources.get(kind, 0) // need for kind, need in needs), 0)


@dataclass(frozen=True)
class TemplateNode:
    """The name of a node that could be rented; it differs from every real node's name."""

    number: int


def _check_resources(resources: Mapping[str, int]) -> None:
    if not resources or not all(amount >= 0 for amount in resources.values()):
        raise ValueError(f"resources: {dict(resources)} must be amounts of at least 0")
    if not any(resources.values()):
        raise ValueError("resources: a replica must ask for something, as in {'slots': 1}")
