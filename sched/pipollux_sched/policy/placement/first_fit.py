"""Placing one job that has just come, until all jobs are weighed against each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipollux_sched.policy.allocation import Allocation
from pipollux_sched.policy.job_info import JobInfo, NodeInfo
from pipollux_sched.policy.pollux.arrays import applicable_shapes, by_safety, room
from pipollux_sched.policy.rules import usable_nodes


def place_arrival(job: JobInfo, free: Mapping[Any, NodeInfo]) -> Allocation:
    """Give a job its least number of replicas on the first node with room, moving no other.

    Args:
        job: the job.
        free: nodes with what is FREE on them.

    Returns:
        `min_replicas` (at least one) replicas on one node that takes new ones, safe nodes before
        preemptible ones, in the first of the job's shapes for which there is room; else nothing.
    """
    replicas = max(job.min_replicas, 1)
    usable = usable_nodes(free)
    names = by_safety(usable)
    for index, shape in enumerate(job.all_shapes):
        if replicas > job.most_replicas(shape):
            continue
        kinds = sorted(shape.resources)
        need = np.array([shape.resources[kind] for kind in kinds])
        for name in names:
            node = usable[name]
            left = np.array([node.resources.get(kind, 0) for kind in kinds])
            if list(applicable_shapes(job, node))[index] and room(need, left) >= replicas:
                return Allocation([name] * replicas, shape)
    return Allocation()
