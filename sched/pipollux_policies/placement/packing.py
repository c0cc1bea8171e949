"""Placement of jobs by priority, and the requests of policies with fixed sizes.

Running jobs that should continue start where they are. Then each job that holds nothing is placed
in turn: on free room, else by preempting as few jobs of lower priority as possible, the lowest
first. Preempted jobs are placed again in their turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from pipollux_policies.allocations.allocation import Allocation
from pipollux_policies.allocations.rules import Allocations, Jobs, Nodes
from pipollux_policies.jobs.job_info import JobInfo, ReplicaShape

from .cluster_state import ClusterState, ReplicaRequest
from .node_choice import Floats, Ints

S = TypeVar("S")


def user_shapes(job: JobInfo) -> tuple[ReplicaShape, ...]:
    """Return the shapes for policies that do not choose a job's number of stages. Its own shape
    and, if that is for one type of GPU, the first one of each other type.
    """
    own = job.all_shapes[0]
    chosen: dict[str | None, ReplicaShape] = {own.gpu_type: own}
    if own.gpu_type is not None:
        for shape in job.shapes:
            chosen.setdefault(shape.gpu_type, shape)
    return tuple(chosen.values())


def request_of(job: JobInfo, num_replicas: int) -> ReplicaRequest:
    """Return the request for a number of replicas, in those of `user_shapes` that allow it."""
    shapes = (shape for shape in user_shapes(job) if job.most_replicas(shape) >= num_replicas)
    return ReplicaRequest(tuple(shapes), num_replicas)


def fixed_request(job: JobInfo) -> ReplicaRequest:
    """Return the request of a fixed-size policy: `requested_replicas` within the bounds."""
    least = job.least_replicas
    most = max(job.most_replicas(shape) for shape in user_shapes(job))
    return request_of(job, min(max(job.requested_replicas or least, least), max(most, least)))


def speedups(
    shape: ReplicaShape, num_nodes: Ints, num_replicas: Ints, levels: Ints | None = None
) -> Floats:
    """Return the speedups of C allocations, (C,); 0 instead of NaN. `levels` are the network levels
    at which their nodes meet; None: the lowest.
    """
    found = np.zeros(num_nodes.shape)
    for level in np.unique(levels).tolist() if levels is not None else (1,):
        here = slice(None) if levels is None else levels == level
        values = np.asarray(
            shape.speedup_at(level)(num_nodes[here], num_replicas[here]), dtype=float
        )
        found[here] = np.nan_to_num(np.maximum(values, 0), posinf=0)
    return found


def pack(
    state: ClusterState, order: Sequence[Any], wants: Mapping[Any, Sequence[ReplicaRequest]]
) -> dict[Any, int]:
    """Place all jobs that hold nothing; return the index of the request that was met, by job.

    `state` holds the allocations that should stay, if possible; `order` has the highest priority
    first; `wants` the requests of each job, best first.
    """
    met: dict[Any, int] = {}
    for rank, name in enumerate(order):
        if name in state.allocations:
            continue
        for number, request in enumerate(wants.get(name, ())):
            found = state.find(name, request) or _make_way(state, name, request, order[rank + 1 :])
            if found:
                state.put(name, found)
                met[name] = number
                break
    return met


def _make_way(
    state: ClusterState, name: Any, request: ReplicaRequest, lower: Sequence[Any]
) -> Allocation | None:
    movable = [other for other in lower if other in state.allocations and other not in state.pinned]
    taken = [(other, state.take(other)) for other in movable]
    possible = state.find(name, request) is not None
    for other, allocation in taken:
        state.put(other, allocation)
        if possible and state.find(name, request) is None:
            state.take(other)
    return state.find(name, request) if possible else None


def unchanged(jobs: Jobs, one: Allocations, other: Allocations) -> bool:
    """Return whether every job has the same replicas on the same nodes in both."""

    def held(allocations: Allocations, name: Any) -> tuple[Counter[Any], int | None]:
        allocation = allocations.get(name, ())
        return Counter(allocation), getattr(allocation, "num_stages", None)

    return all(held(one, name) == held(other, name) for name in jobs)


def settle(start: S, step: Callable[[S], S], cost: Callable[[S], float]) -> S:
    """Repeat a step as long as it lowers the cost, so that a second call changes nothing."""
    while True:
        following = step(start)
        if not cost(following) < cost(start):
            return start
        start = following


def answer(
    jobs: Jobs, base_allocations: Allocations, allocations: Mapping[Any, Allocation]
) -> dict[Any, Allocation]:
    """Return every job's allocation; an unchanged one keeps the order of its list."""
    result: dict[Any, Allocation] = {}
    for name in jobs:
        held = allocations.get(name, Allocation())
        base = base_allocations.get(name, ())
        stages = getattr(base, "num_stages", None)
        same = Counter(base) == Counter(held) and stages in (None, held.num_stages)
        result[name] = Allocation(base, held.shape, held.level) if same else held
    return result


def num_nodes_as_is(jobs: Jobs, nodes: Nodes) -> int:
    """Return the present number of nodes, for policies that do not advise on it."""
    return len(nodes) or (1 if jobs else 0)


def place_requested(job_info: JobInfo, nodes: Nodes) -> Allocation:
    """Place an arriving job on its requested replicas if the FREE resources of nodes suffice."""
    return place_alone(job_info, nodes, fixed_request(job_info).num_replicas)


def place_alone(job: JobInfo, nodes: Nodes, num_replicas: int) -> Allocation:
    """Place an arriving job on nodes with these FREE resources; empty if there is no room."""
    state = ClusterState({"": job}, nodes, {})
    return state.find("", request_of(job, num_replicas)) or Allocation()
