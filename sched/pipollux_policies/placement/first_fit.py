"""Placement of one arriving job, until the policy decides about all jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipollux_policies.allocations.allocation import Allocation, is_first_choice
from pipollux_policies.allocations.order import by_safety
from pipollux_policies.allocations.rules import usable_nodes
from pipollux_policies.jobs.job_info import JobInfo, NodeInfo


def place_arrival(job_info: JobInfo, nodes: Mapping[Any, NodeInfo]) -> Allocation:
    """Place a job's fewest replicas on the first node with enough FREE resources, if any. Safe
    nodes come before preemptible ones. The first of the job's shapes that fits is used.
    """
    usable, replicas = usable_nodes(nodes), job_info.least_replicas
    for shape in job_info.all_shapes:
        if replicas > job_info.most_replicas(shape):
            continue
        for name in by_safety(usable):
            node = usable[name]
            fits = node.num_fitting(shape) >= replicas
            if fits and is_first_choice(job_info, shape, node.gpu_type):
                return Allocation([name] * replicas, shape)
    return Allocation()
