"""Placing whole replicas in an order of importance, and what policies of fixed sizes ask for.

Jobs that run and shall go on start out where they are. Then every job that holds nothing is placed
in turn: where there is room, else by taking from less important jobs what is in its way, as few of
them as possible, the least important first. Those are placed anew when it is their turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from pipollux_sched.policy.allocation import Allocation
from pipollux_sched.policy.job_info import JobInfo, ReplicaShape
from pipollux_sched.policy.pollux.arrays import Floats, Ints
from pipollux_sched.policy.rules import Allocations, Jobs, Nodes

from .free_space import FreeSpace, ReplicaRequest

S = TypeVar("S")


def least_replicas(job: JobInfo) -> int:
    """Return the fewest replicas that a job runs on."""
    return max(job.min_replicas, 1)


def user_shapes(job: JobInfo) -> tuple[ReplicaShape, ...]:
    """Return the shapes that a job runs in where no policy chooses its number of stages.

    Its own; and, where that is for one type of GPU, the first that it lists for each other type.
    """
    own = job.all_shapes[0]
    chosen: dict[str | None, ReplicaShape] = {own.gpu_type: own}
    if own.gpu_type is not None:
        for shape in job.shapes:
            chosen.setdefault(shape.gpu_type, shape)
    return tuple(chosen.values())


def request_of(job: JobInfo, num_replicas: int) -> ReplicaRequest:
    """Return the request for so many replicas in the job's own shapes, as far as they may be."""
    shapes = user_shapes(job)
    return ReplicaRequest(
        tuple(s for s in shapes if job.most_replicas(s) >= num_replicas), num_replicas
    )


def fixed_request(job: JobInfo) -> ReplicaRequest:
    """Return what a policy of fixed sizes gives a job: `requested_replicas` within its bounds."""
    least = least_replicas(job)
    most = max(job.most_replicas(shape) for shape in user_shapes(job))
    return request_of(job, min(max(job.requested_replicas or least, least), max(most, least)))


def speedups(shape: ReplicaShape, num_nodes: Ints, num_replicas: Ints) -> Floats:
    """Return speedups, (C,); one that is not a number is no reason to give a job anything: 0."""
    found = np.asarray(shape.speedup_fn(num_nodes, num_replicas), dtype=float)
    values: Floats = np.nan_to_num(np.maximum(np.broadcast_to(found, num_nodes.shape), 0), posinf=0)
    return values


def pack(
    space: FreeSpace, order: Sequence[Any], wants: Mapping[Any, Sequence[ReplicaRequest]]
) -> dict[Any, int]:
    """Place all jobs that hold nothing, the most important first.

    Args:
        space: where to; jobs that shall stay, if possible, hold their allocations already.
        order: all jobs that may be given something or moved, the most important first.
        wants: what each job asks for, the best first; a job that is not in it gets nothing.

    Returns:
        Which of its requests was met, by its number, for every job that was placed.
    """
    met: dict[Any, int] = {}
    for rank, name in enumerate(order):
        if name in space.allocations:
            continue
        for number, request in enumerate(wants.get(name, ())):
            found = space.find(name, request) or _make_way(space, name, request, order[rank + 1 :])
            if found:
                space.put(name, found)
                met[name] = number
                break
    return met


def _make_way(
    space: FreeSpace, name: Any, request: ReplicaRequest, lower: Sequence[Any]
) -> Allocation | None:
    movable = [other for other in lower if other in space.allocations and other not in space.pinned]
    taken = [(other, space.take(other)) for other in movable]
    possible = space.find(name, request) is not None
    for other, allocation in taken:
        space.put(other, allocation)
        if possible and space.find(name, request) is None:
            space.take(other)
    return space.find(name, request) if possible else None


def unchanged(jobs: Jobs, one: Allocations, other: Allocations) -> bool:
    """Tell whether every job has the same replicas on the same nodes in both."""

    def held(allocations: Allocations, name: Any) -> tuple[Counter[Any], int | None]:
        allocation = allocations.get(name, ())
        return Counter(allocation), getattr(allocation, "num_stages", None)

    return all(held(one, name) == held(other, name) for name in jobs)


def settle(start: S, step: Callable[[S], S], cost: Callable[[S], float]) -> S:
    """Take a step as long as it lowers the cost, so that asking again changes nothing."""
    while True:
        following = step(start)
        if not cost(following) < cost(start):
            return start
        start = following


def answer(
    jobs: Jobs, base_allocations: Allocations, allocations: Mapping[Any, Allocation]
) -> dict[Any, Allocation]:
    """Return every job's allocation; one that is unchanged keeps the order of its list."""
    result: dict[Any, Allocation] = {}
    for name in jobs:
        held = allocations.get(name, Allocation())
        base = base_allocations.get(name, ())
        stages = getattr(base, "num_stages", None)
        same = Counter(base) == Counter(held) and stages in (None, held.num_stages)
        result[name] = Allocation(base, held.shape) if same else held
    return result


def num_nodes_as_is(jobs: Jobs, nodes: Nodes) -> int:
    """Return the advice of policies that have none: as many nodes as there are."""
    return len(nodes) or (1 if jobs else 0)


def place_alone(job: JobInfo, nodes: Nodes, num_replicas: int) -> list[Any]:
    """Place one job on what is free, moving nothing; an empty list if there is no room.

    Args:
        job: the job.
        nodes: nodes with what is FREE on them.
        num_replicas: how many replicas to place.
    """
    space = FreeSpace({"": job}, nodes, {})
    return space.find("", request_of(job, num_replicas)) or Allocation()
