"""Jobs within limits: the same job with fewer replicas, or with fewer shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipollux_policies.allocation import Allocation, shape_of
from pipollux_policies.job_info import JobInfo, NodeInfo, ReplicaShape


def slots_of(job: JobInfo, held: Sequence[Any], nodes: Mapping[Any, NodeInfo]) -> int:
    """Return the slots that a job holds."""
    return len(held) * shape_of(job, held, nodes).slots if held else 0


def within(job: JobInfo, slots: int, preferred: ReplicaShape | None = None) -> JobInfo | None:
    """Return a job that never holds more than some slots; None: it does not run on so few.

    Args:
        job: the job.
        slots: how many.
        preferred: the shape that it is to have if it fits; None: its own.
    """
    limits = {}
    for number, shape in enumerate(job.all_shapes):
        most = min(job.most_replicas(shape), slots // shape.slots)
        # An allocation means the first shape of its stages that runs there (`shape_of`): without
        # that one, a later one would be taken for it.
        hidden = any(
            earlier not in limits and _same_place(job.all_shapes[earlier], shape)
            for earlier in range(number)
        )
        if most >= job.least_replicas and not hidden:
            limits[number] = most
    if not limits:
        return None
    stages = None if preferred is None else preferred.num_stages
    # Those of as many stages keep their order, for the same reason.
    first, *rest = sorted(limits, key=lambda number: job.all_shapes[number].num_stages != stages)
    own = job.all_shapes[first]
    others = tuple(replace(job.all_shapes[n], max_replicas=limits[n]) for n in rest)
    most = limits[first]
    asked = job.requested_replicas
    return replace(
        job,
        resources=own.resources,
        speedup_fn=own.speedup_fn,
        num_stages=own.num_stages,
        gpu_type=own.gpu_type,
        shapes=others,
        max_replicas=most,
        requested_replicas=None if asked is None else min(asked, most),
    )


def cut(job: JobInfo, held: Allocation, slots: int, nodes: Mapping[Any, NodeInfo]) -> Allocation:
    """Return as much of an allocation as some slots hold, on as few nodes as possible.

    Nothing is left of one of which less than the job's fewest replicas would be.
    """
    if slots_of(job, held, nodes) <= slots:
        return held
    shape = shape_of(job, held, nodes)
    number = min(slots // shape.slots, len(held))
    if number < job.least_replicas:
        return Allocation()
    fullest = sorted(held, key=lambda node: (-held.count(node), str(node)))
    return Allocation(fullest[:number], shape)


def _same_place(one: ReplicaShape, other: ReplicaShape) -> bool:
    """Tell whether there are GPUs on which an allocation might mean either."""
    types = {one.gpu_type, other.gpu_type}
    return one.num_stages == other.num_stages and (len(types) == 1 or None in types)
