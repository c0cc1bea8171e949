"""What jobs ask for and what nodes have, in the form that allocation policies take.

Specs (what the user said) and hints (what the job measured) become `JobInfo` and `NodeInfo`; beside
them what follows from resources alone: how many replicas fit, and what allocations leave free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipollux_perfmodel import Configuration, SchedHints, SpeedupFunction

from .policy import DEFAULT_RESTART_SECONDS, JobInfo, NodeInfo
from .spec import JobSpec, NodeSpec

UNSTATED = 2**50
"""What a node has of CPUs or memory if its spec does not say: more than any job asks for."""


def linear_speedup(num_nodes: Any, num_replicas: Any) -> Any:  # noqa: ARG001  # as every speedup function
    """Return the speedup of a job that nothing is known of: each replica adds a whole one."""
    return np.asarray(num_replicas, dtype=float)


def node_info(spec: NodeSpec) -> NodeInfo:
    """Bring a node into the policy's form."""
    amounts = {"slots": spec.slots, "cpus": spec.cpus, "memory": spec.memory}
    return NodeInfo(
        {kind: UNSTATED if amount is None else amount for kind, amount in amounts.items()},
        spec.preemptible,
    )


def replica_resources(spec: JobSpec) -> dict[str, int]:
    """Return what one replica of a job holds of its node: its K slots, and what else it asks."""
    asked = {"cpus": spec.resources.cpus, "memory": spec.resources.memory}
    return {"slots": spec.num_stages, **{kind: amount for kind, amount in asked.items() if amount}}


def replica_cap(spec: JobSpec, hints: SchedHints | None) -> int:
    """Return how many replicas a job may get: at most twice what it was ever measured on.

    AdaptDL's rule. What was not seen is predicted optimistically, and this bounds the risk; a job
    that was never measured starts small.
    """
    profiled = hints.max_profiled_replicas if hints else 0
    return min(spec.max_replicas, max(2 * profiled, spec.min_replicas, 1))


def job_info(
    spec: JobSpec,
    hints: SchedHints | None,
    *,
    age: float,
    created: float = 0.0,
    num_restarts: int = 0,
    restart_seconds: float = DEFAULT_RESTART_SECONDS,
) -> JobInfo:
    """Bring a job into the policy's form.

    Args:
        spec: what the user asked for.
        hints: the latest that is known of the job; None or incomplete hints mean linear speedup.
        age: seconds since submission.
        created: time of submission, seconds since any fixed moment.
        num_restarts: how often its allocation was changed so far.
        restart_seconds: what one restart costs it.
    """
    return JobInfo(
        resources=replica_resources(spec),
        speedup_fn=(hints.speedup_function() if hints else None) or linear_speedup,
        creation_timestamp=created,
        min_replicas=spec.min_replicas,
        max_replicas=replica_cap(spec, hints),
        preemptible=spec.preemptible,
        num_stages=spec.num_stages,
        age=age,
        num_restarts=num_restarts,
        restart_seconds=restart_seconds,
    )


def configuration(info: JobInfo, nodes: Sequence[str]) -> Configuration | None:
    """Return how a job would run on an allocation; None if it gets none or nothing is known."""
    if not nodes or not isinstance(info.speedup_fn, SpeedupFunction):
        return None
    return info.speedup_fn.configuration(len(set(nodes)), len(nodes))


def count_fitting(resources: Mapping[str, int], free: Mapping[str, int]) -> int:
    """Return how many replicas that hold `resources` each fit what is free on one node."""
    counts = [max(free.get(kind, 0), 0) // need for kind, need in resources.items() if need > 0]
    return min(counts)


def free_resources(
    nodes: Mapping[str, NodeInfo],
    jobs: Mapping[str, JobInfo],
    allocations: Mapping[str, Sequence[str]],
) -> dict[str, dict[str, int]]:
    """Return what allocations leave of every node, by kind of resource; never below 0 replicas."""
    free = {name: dict(node.resources) for name, node in nodes.items()}
    for job, allocation in allocations.items():
        for name in allocation:
            if name in free:
                for kind, amount in jobs[job].resources.items():
                    free[name][kind] = free[name].get(kind, 0) - amount
    return free


def node_template(nodes: Mapping[str, NodeInfo]) -> NodeInfo:
    """Return a node as could be rented: as much of every resource as the largest node has."""
    kinds = {kind for node in nodes.values() for kind in node.resources}
    most = {kind: max(node.resources.get(kind, 0) for node in nodes.values()) for kind in kinds}
    return NodeInfo(most, preemptible=True)
