"""Jobs within limits: the same job with fewer replicas, or with fewer shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipollux_policies.allocations.allocation import Allocation, shape_of
from pipollux_policies.jobs.job_info import JobInfo, NodeInfo, ReplicaShape


def slots_of(job: JobInfo, held: Sequence[Any], nodes: Mapping[Any, NodeInfo]) -> int:
    """Return the slots that a job holds."""
    return len(held) * shape_of(job, held, nodes).slots if held else 0


def within(job: JobInfo, slots: int, preferred: ReplicaShape | None = None) -> JobInfo | None:
    """Return the job limited to a number of slots, with `preferred` first; None: it needs more."""
    limits = {}
    for number, shape in enumerate(job.all_shapes):
        most = min(job.most_replicas(shape), slots // shape.slots)
        # An allocation stands for the first shape with its stages that runs there (`shape_of`): if
        # that one does not fit, later ones with the same stages must be dropped too.
        hidden = any(
            earlier not in limits and _same_place(job.all_shapes[earlier], shape)
            for earlier in range(number)
        )
        if most >= job.least_replicas and not hidden:
            limits[number] = most
    if not limits:
        return None
    stages = None if preferred is None else preferred.num_stages
    # Shapes with the same number of stages keep their order, for the same reason.
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
    """Return the part of an allocation that fits into a number of slots, on few nodes, if any."""
    if slots_of(job, held, nodes) <= slots:
        return held
    shape = shape_of(job, held, nodes)
    number = min(slots // shape.slots, len(held))
    if number < job.least_replicas:
        return Allocation()
    fullest = sorted(held, key=lambda node: (-held.count(node), str(node)))
    return Allocation(fullest[:number], shape)


def _same_place(one: ReplicaShape, other: ReplicaShape) -> bool:
    """Return whether an allocation could stand for either shape on some type of GPU."""
    types = {one.gpu_type, other.gpu_type}
    return one.num_stages == other.num_stages and (len(types) == 1 or None in types)
