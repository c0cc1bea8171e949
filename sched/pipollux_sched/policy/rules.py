"""What every allocation has to keep to, whichever policy it comes from (docs/policies.md).

`violations` looks at a policy's answer from outside: it shares no code with any policy, so tests,
the simulator and the scheduler can hold all of them to the same rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from .allocation import shape_of
from .job_info import JobInfo, NodeInfo

Jobs: TypeAlias = Mapping[Any, JobInfo]
Nodes: TypeAlias = Mapping[Any, NodeInfo]
Allocations: TypeAlias = Mapping[Any, Sequence[Any]]


def usable_nodes(nodes: Nodes) -> dict[Any, NodeInfo]:
    """Return the nodes that something new may be put on: healthy, and not draining."""
    return {name: node for name, node in nodes.items() if node.healthy and not node.draining}


def is_pinned(job: JobInfo, allocation: Sequence[Any], nodes: Nodes) -> bool:
    """Tell whether a job's allocation must not be changed.

    That is: it runs, it is not preemptible, and all of its nodes are there and healthy. A node that
    drains lets its pinned jobs end.
    """
    there = all(name in nodes and nodes[name].healthy for name in allocation)
    return bool(allocation) and not job.preemptible and there


def must_move(job: JobInfo, allocation: Sequence[Any], nodes: Nodes) -> bool:
    """Tell whether a job cannot stay where it runs: a node is gone, not healthy, or draining."""
    usable = usable_nodes(nodes)
    stays = all(name in usable for name in allocation)
    return not stays and not is_pinned(job, allocation, nodes)


def violations(
    jobs: Jobs,
    nodes: Nodes,
    base_allocations: Allocations,
    allocations: Allocations,
    *,
    crowding: bool = False,
) -> list[str]:
    """Return every rule that allocations break, a sentence each; none: they are feasible.

    Args:
        jobs: all jobs, by name.
        nodes: all nodes, by name.
        base_allocations: what runs now.
        allocations: what a policy decided.
        crowding: let several distributed jobs share a node, for whoever makes them pay for it.
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
    usable = usable_nodes(nodes)
    barred = sorted({str(node) for node in allocation if node not in usable})
    if barred:
        yield f"job {name!r} is given nodes that take nothing new: {', '.join(barred)}"
        return
    shape = shape_of(job, allocation, nodes)
    if not all(shape.runs_on(nodes[node]) for node in allocation):
        yield f"job {name!r} is for GPUs of type {shape.gpu_type} but is given {list(allocation)}"
    most = job.most_replicas(shape)
    if not max(job.min_replicas, 1) <= len(allocation) <= most:
        yield (
            f"job {name!r} is given {len(allocation)} replicas, "
            f"it may have {max(job.min_replicas, 1)} to {most}"
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
                yield f"node {node!r} has {has} {kind} but {amount} are given away"


def _crowded(
    jobs: Jobs, nodes: Nodes, base_allocations: Allocations, allocations: Allocations
) -> Iterator[str]:
    distributed: Counter[Any] = Counter()
    for name, allocation in allocations.items():
        pinned = name in jobs and is_pinned(jobs[name], base_allocations.get(name, ()), nodes)
        if len(set(allocation)) > 1 and not pinned:
            distributed.update(set(allocation))
    for node, count in distributed.items():
        if count > 1:
            yield f"node {node!r} carries {count} distributed jobs, at most one is allowed"
