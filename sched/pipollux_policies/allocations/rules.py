"""The rules of every policy's allocations (docs/concepts/policies.md), in code that none shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from pipollux_policies.jobs.job_info import JobInfo, NodeInfo
from pipollux_utils.text import count

from .allocation import shape_of

Jobs: TypeAlias = Mapping[Any, JobInfo]
Nodes: TypeAlias = Mapping[Any, NodeInfo]
Allocations: TypeAlias = Mapping[Any, Sequence[Any]]


def usable_nodes(nodes: Nodes) -> dict[Any, NodeInfo]:
    """Return the nodes that take new replicas: healthy, and not draining."""
    return {name: node for name, node in nodes.items() if _takes_replicas(node)}


def _takes_replicas(node: NodeInfo) -> bool:
    return node.healthy and not node.draining


def is_pinned(job: JobInfo, allocation: Sequence[Any], nodes: Nodes) -> bool:
    """Return whether a job's allocation must not change. It runs, is not preemptible, and all of
    its nodes are healthy, though they may be draining.
    """
    there = all(name in nodes and nodes[name].healthy for name in allocation)
    return bool(allocation) and not job.preemptible and there


def must_move(job: JobInfo, allocation: Sequence[Any], nodes: Nodes) -> bool:
    """Return whether a job must leave its nodes: one is gone, not healthy, or draining."""
    stays = all(name in nodes and _takes_replicas(nodes[name]) for name in allocation)
    return not stays and not is_pinned(job, allocation, nodes)


def violations(
    jobs: Jobs,
    nodes: Nodes,
    base_allocations: Allocations,
    allocations: Allocations,
    *,
    crowding: bool = False,
) -> list[str]:
    """Return a message for every broken rule; empty: the allocations are feasible.

    Args:
        jobs: all jobs, by name.
        nodes: all nodes, by name.
        base_allocations: the current allocations.
        allocations: the decision of a policy.
        crowding: allow several distributed jobs on a node, for callers that add a cost for it.
    """
    found = [f"job {name!r} is not one of the jobs" for name in allocations if name not in jobs]
    for name, job in jobs.items():
        base, nodes_of = base_allocations.get(name, ()), allocations.get(name, ())
        found.extend(_job_violations(name, job, nodes, base, nodes_of))
    found.extend(_overcommitted(jobs, nodes, allocations))
    if not crowding:
        found.extend(_crowded(jobs, nodes, base_allocations, allocations))
    return found


def _job_violations(
    name: Any, job: JobInfo, nodes: Nodes, base: Sequence[Any], allocation: Sequence[Any]
) -> Iterator[str]:
    if is_pinned(job, base, nodes):
        if Counter(base) != Counter(allocation):
            yield f"job {name!r} is pinned to {list(base)} but is given {list(allocation)}"
        elif (stages := shape_of(job, base, nodes).num_stages) != (
            given := shape_of(job, allocation, nodes).num_stages
        ):
            yield f"job {name!r} is pinned to {stages} stages but is given {given}"
        return
    if not allocation:
        return
    usable = usable_nodes({name: nodes[name] for name in allocation if name in nodes})
    barred = sorted({str(node) for node in allocation if node not in usable})
    if barred:
        yield f"job {name!r} is placed on nodes that take no new replicas: {', '.join(barred)}"
        return
    shape = shape_of(job, allocation, nodes)
    if not all(shape.runs_on(nodes[node]) for node in allocation):
        yield f"job {name!r} is for GPUs of type {shape.gpu_type} but is on {list(allocation)}"
    most = job.most_replicas(shape)
    if not job.least_replicas <= len(allocation) <= most:
        yield (
            f"job {name!r} has {count(len(allocation), 'replica')}, "
            f"allowed are {job.least_replicas} to {most}"
        )


def _overcommitted(jobs: Jobs, nodes: Nodes, allocations: Allocations) -> Iterator[str]:
    held: dict[Any, Counter[str]] = {name: Counter() for name in nodes}
    for name, allocation in allocations.items():
        if name not in jobs:
            continue
        resources = shape_of(jobs[name], allocation, nodes).resources
        for node in allocation:
            if node in held:
                held[node].update(resources)
    for node, amounts in held.items():
        for kind, amount in amounts.items():
            has = nodes[node].resources.get(kind, 0)
            if amount > has:
                yield f"node {node!r} has {has} {kind} but {amount} are allocated"


def _crowded(
    jobs: Jobs, nodes: Nodes, base_allocations: Allocations, allocations: Allocations
) -> Iterator[str]:
    distributed: Counter[Any] = Counter()
    for name, allocation in allocations.items():
        pinned = name in jobs and is_pinned(jobs[name], base_allocations.get(name, ()), nodes)
        if len(set(allocation)) > 1 and not pinned:
            distributed.update(set(allocation))
    for node, carried in distributed.items():
        if carried > 1:
            yield f"node {node!r} carries {carried} distributed jobs, at most one is allowed"
