"""What an allocation policy knows of a job and of a node: names and order as in AdaptDL.

A job asks for resources per pipeline replica, and a replica's resources lie on ONE node; a policy
therefore sees a replica of K stages as ``{"slots": K, ...}`` and never splits it. What more
replicas are worth is one function, the speedup relative to one replica (Pollux, OSDI'21, §4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

SpeedupCallable: TypeAlias = Callable[[Any, Any], Any]
"""``speedup(num_nodes, num_replicas)``: equal-shaped integer arrays in, array of floats out."""

DEFAULT_RESTART_SECONDS = 30.0
"""What one checkpoint-restart is taken to cost before a job's own was measured (the paper's)."""


@dataclass(frozen=True)
class JobInfo:
    """What a policy may know of one job.

    Example:
        >>> JobInfo({"slots": 2}, lambda nodes, replicas: replicas, 0.0, 1, 4).num_stages
        1

    Raises:
        ValueError: a bound, a resource or a time is out of range; the message names it.
    """

    resources: Mapping[str, int]
    """What ONE replica holds on ONE node: ``{"slots": K, "cpus": …, "memory": bytes}``."""
    speedup_fn: SpeedupCallable
    """Speedup over one replica, vectorised over ``(num_nodes, num_replicas)``."""
    creation_timestamp: datetime | float
    """When the job was submitted: a time stamp, or seconds since the epoch."""
    min_replicas: int
    """Fewer replicas than this are as good as none: the job gets at least so many, or nothing."""
    max_replicas: int
    """More replicas than this are never given."""
    preemptible: bool = True
    """False: once the job runs, its allocation does not change any more (it is pinned)."""
    num_stages: int = 1
    """K, the number of stages of a replica; informative, as ``resources`` already counts slots."""
    age: float = 0.0
    """Seconds since submission."""
    num_restarts: int = 0
    """How often the job's allocation was changed so far."""
    restart_seconds: float = DEFAULT_RESTART_SECONDS
    """What one restart costs this job, in seconds without training."""

    def __post_init__(self) -> None:
        if not self.resources or not all(amount >= 0 for amount in self.resources.values()):
            raise ValueError(f"resources: {dict(self.resources)} must be amounts of at least 0")
        if not any(self.resources.values()):
            raise ValueError("resources: a replica must ask for something, as in {'slots': 1}")
        if self.max_replicas < 1:
            raise ValueError(f"max_replicas: {self.max_replicas} must be at least 1")
        if not 0 <= self.min_replicas <= self.max_replicas:
            raise ValueError(
                f"min_replicas: {self.min_replicas} must be between 0 and "
                f"max_replicas = {self.max_replicas}"
            )
        for name in ("num_stages", "age", "num_restarts", "restart_seconds"):
            least = 1 if name == "num_stages" else 0
            if not getattr(self, name) >= least:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least {least}")

    @property
    def created(self) -> float:
        """`creation_timestamp` in seconds since the epoch, whichever way it was given."""
        stamp = self.creation_timestamp
        return stamp.timestamp() if isinstance(stamp, datetime) else float(stamp)


@dataclass(frozen=True)
class NodeInfo:
    """What a policy may know of one node: what jobs may use of it, and how safe it is."""

    resources: Mapping[str, int]
    """Amounts by name, as in `JobInfo.resources`; a missing name is a resource not there."""
    preemptible: bool = False
    """True for a node that may be taken away at any time; such nodes are filled last."""
