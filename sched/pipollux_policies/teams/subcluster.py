"""A part of a cluster with a given number of slots, in which a policy decides for one group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipollux_policies.allocations.allocation import Allocation, shape_of
from pipollux_policies.allocations.order import name_order
from pipollux_policies.allocations.rules import Allocations, Jobs, Nodes, usable_nodes
from pipollux_policies.jobs.job_info import JobInfo, NodeInfo


def without(jobs: Jobs, nodes: Nodes, held: Allocations) -> dict[Any, NodeInfo]:
    """Return the nodes with the resources that allocations leave, at least 0."""
    left = {name: Counter(node.resources) for name, node in nodes.items()}
    for name, allocation in held.items():
        resources = shape_of(jobs[name], allocation, nodes).resources
        for node in allocation:
            if node in left:
                left[node].subtract(resources)
    return {
        name: replace(node, resources={kind: max(n, 0) for kind, n in left[name].items()})
        for name, node in nodes.items()
    }


def part_of(nodes: Nodes, slots: int, jobs: Jobs, base: Allocations) -> dict[Any, NodeInfo]:
    """Return the same nodes with at most a number of slots in total.

    Slots are kept where the jobs are, then on the freest nodes, in multiples of the size of a
    replica if all replicas have the same size, so that no replica is cut.
    """
    widths = {shape.slots for job in jobs.values() for shape in job.all_shapes}
    unit = widths.pop() if len(widths) == 1 else 1
    here: Counter[Any] = Counter()
    for name, held in base.items():
        for node in held:
            here[node] += shape_of(jobs[name], held, nodes).slots
    usable = usable_nodes(nodes)

    def order(name: Any) -> tuple[Any, ...]:
        return -here[name], -nodes[name].resources.get("slots", 0), name_order(name)

    kept = {}
    for name in sorted(nodes, key=order):
        node = nodes[name]
        most = min(node.resources.get("slots", 0), slots) if name in usable else 0
        taken = most - most % unit
        slots -= taken
        kept[name] = replace(node, resources={**node.resources, "slots": taken})
    return {name: kept[name] for name in nodes}


def fitting_base(jobs: Jobs, nodes: Nodes, base: Allocations) -> dict[Any, Sequence[Any]]:
    """Return the replicas of current allocations that fit on these nodes, in order of names."""
    left = {name: Counter(node.resources) for name, node in nodes.items()}
    found: dict[Any, Sequence[Any]] = {}
    for name in sorted(base, key=name_order):
        held = base[name]
        shape = shape_of(jobs[name], held, nodes)
        kept = []
        for node in held:
            if node in left and all(left[node][k] >= n for k, n in shape.resources.items()):
                left[node].subtract(shape.resources)
                kept.append(node)
        if len(kept) == len(held):
            found[name] = held
        elif len(kept) >= jobs[name].least_replicas:
            found[name] = Allocation(kept, shape)
    return found


def restricted_base(jobs: Mapping[Any, JobInfo], base: Allocations) -> dict[Any, Sequence[Any]]:
    """Return the current allocations of these jobs."""
    return {name: base[name] for name in jobs if base.get(name)}
