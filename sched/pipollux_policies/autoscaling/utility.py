"""The utility of a cluster: the share of its potential that its jobs use (Pollux, §4.2.2).

    utility = max_t Σ_j speedup_j / ideal_j · held[j, t] / total[t]

held[j, t] is the amount of resource t that job j holds. The ideal speedup is that of a job that
scales without loss: of its most efficient single replica, times the number of such replicas that
its resources could hold. For jobs of one shape this is the paper's speedup per replica, weighted by
the job's share of the cluster.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipollux_policies.allocations.allocation import network_level, shape_of
from pipollux_policies.jobs.job_info import JobInfo, NodeInfo, ReplicaShape


@dataclass(frozen=True)
class UtilityBand:
    """The band, 0 <= low < high <= 1, in which the number of nodes stays; as in the paper."""

    low: float = 0.35
    high: float = 0.65

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(
                f"utility band: low = {self.low} and high = {self.high} must satisfy "
                "0 <= low < high <= 1"
            )

    @property
    def target(self) -> float:
        """The middle of the band."""
        return (self.low + self.high) / 2


def utility(
    jobs: Mapping[Any, JobInfo],
    nodes: Mapping[Any, NodeInfo],
    allocations: Mapping[Any, Sequence[Any]],
) -> float:
    """Return the utility of nodes under allocations, 0.0 if nothing is allocated.

    Args:
        jobs: all jobs, by name.
        nodes: the nodes to evaluate; replicas on other nodes do not count.
        allocations: the allocation of each job.

    Example:
        >>> job = JobInfo({"slots": 1}, lambda nodes, replicas: replicas**0.5, 0.0, 1, 4)
        >>> utility({"a": job}, {"n": NodeInfo({"slots": 4})}, {"a": ["n"] * 4})
        0.5
    """
    total: Counter[str] = Counter()
    for node in nodes.values():
        total.update(node.resources)
    useful: dict[str, float] = defaultdict(float)
    for name, job in jobs.items():
        allocation = allocations.get(name, ())
        here = sum(node in nodes for node in allocation)
        if here:
            shape = shape_of(job, allocation, nodes)
            efficiency = _efficiency(
                job, shape, allocation, total, network_level(allocation, nodes)
            )
            for kind, need in shape.resources.items():
                useful[kind] += efficiency * need * here
    return max((held / total[kind] for kind, held in useful.items() if total[kind]), default=0.0)


def _efficiency(
    job: JobInfo,
    shape: ReplicaShape,
    allocation: Sequence[Any],
    total: Mapping[str, int],
    level: int,
) -> float:
    share = _share(shape, total)
    # A slower GPU is not a loss: the ideal is for the same type.
    alike = [other for other in job.all_shapes if other.gpu_type == shape.gpu_type]
    paces = [_speedup(other, 1, 1) / (_share(other, total) or math.inf) for other in alike]
    # If no single replica can run, r feasible replicas count as r (`SpeedupFunction`).
    best = max(paces) or 1.0 / (share or math.inf)
    ideal = best * share * len(allocation)
    speedup = _speedup(shape, len(set(allocation)), len(allocation), level)
    return speedup / ideal if ideal else 0.0


def _share(shape: ReplicaShape, total: Mapping[str, int]) -> float:
    kinds = (kind for kind in shape.resources if total.get(kind))
    return max((shape.resources[kind] / total[kind] for kind in kinds), default=0.0)


def _speedup(shape: ReplicaShape, num_nodes: int, num_replicas: int, level: int = 1) -> float:
    answer = shape.speedup_at(level)(np.array([num_nodes]), np.array([num_replicas]))
    value = float(np.broadcast_to(np.asarray(answer, dtype=float), (1,))[0])
    return value if 0 < value < math.inf else 0.0
