"""Reasons for allocations, as sentences for users."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipollux_policies import JobInfo, NodeInfo, ReplicaShape, shape_of, usable_nodes
from pipollux_policies.allocations.allocation import network_level
from pipollux_utils.text import count, listing, spell_nodes

from .job_infos import DEVICE_SLOTS, count_fitting, linear_speedup

MOST_NAMED = 3


class Others(NamedTuple):
    """The jobs of a cluster, for reasons that name them."""

    holders: Mapping[str, Sequence[str]]
    """Names of the jobs on each node."""
    waiting: Sequence[tuple[str, JobInfo]]
    """Jobs that hold nothing, in order of submission."""


NOBODY = Others({}, ())


def misfit(job: str, info: JobInfo, nodes: Mapping[str, NodeInfo]) -> str | None:
    """Explain why a job cannot run even on the empty cluster; None if it can."""
    reason = _misfit(info, nodes)
    return reason and f"job '{job}' {reason}"


def _misfit(info: JobInfo, nodes: Mapping[str, NodeInfo]) -> str | None:
    reasons = [_misfit_of(shape, info, nodes) for shape in info.all_shapes]
    return None if None in reasons else reasons[0]


def _misfit_of(shape: ReplicaShape, info: JobInfo, nodes: Mapping[str, NodeInfo]) -> str | None:
    suited = {name: node.resources for name, node in nodes.items() if shape.runs_on(node)}
    asked = _spell_resources(shape.resources)
    if not suited:
        types = sorted({node.gpu_type for node in nodes.values() if node.gpu_type})
        has = ", ".join(types) or "none that is stated"
        return (
            f"fits no node: its gpu_type is {shape.gpu_type}, and the cluster has "
            f"{has}; change gpu_type of the job or of the nodes"
        )
    fitting = sum(count_fitting(shape.resources, has) for has in suited.values())
    if not fitting:
        name, has = _largest(shape.resources, suited)
        return (
            f"fits no node: one replica needs {asked} on one node, and the largest "
            f"node, {name}, has {has}; {_advice(shape.resources, suited)}"
        )
    if fitting < info.min_replicas:
        return (
            f"never runs: min_replicas is {info.min_replicas}, with {asked} each, and "
            f"the empty cluster holds {fitting}; lower min_replicas or add nodes"
        )
    return None


def _advice(resources: Mapping[str, int], nodes: Mapping[str, Mapping[str, int]]) -> str:
    lacking = {kind for kind in resources if not any(has.get(kind) for has in nodes.values())}
    for device, kind in DEVICE_SLOTS.items():
        if kind in lacking:
            other = "cpu" if device == "gpu" else "gpu"
            return f"set device: {other} in the job, or add a node with {device.upper()} slots"
    return "ask for less (num_stages, resources) or add a larger node"


def explain(
    info: JobInfo,
    previous: Sequence[str],
    new: Sequence[str],
    nodes: Mapping[str, NodeInfo],
    free: Mapping[str, Mapping[str, int]],
    others: Others = NOBODY,
) -> str:
    """Explain a job's allocation in a short sentence.

    Allocations are an `Allocation` if K is not the job's own. `free` are the resources that all new
    allocations leave free (`free_resources`).
    """
    if not new:
        verb = "is suspended" if previous else "waits"
        return f"{verb}: {why_nothing(info, nodes, free, others)}"
    shape = shape_of(info, new, nodes)
    worth = _spell_speedup(shape, new, nodes)
    if not previous:
        return f"starts on {_spell_allocation(info, shape, new)}: {worth}"
    gone = sorted(set(previous) - nodes.keys())
    if gone:
        return f"moves to {_spell_allocation(info, shape, new)}: {', '.join(gone)} is gone"
    before = shape_of(info, previous, nodes)
    had = _speedup(before, previous, nodes)
    change = f"speedup {had:.2f} → {worth.removeprefix('speedup ')}"
    if before.num_stages != shape.num_stages:
        cut = _spell_cut(before, previous), _spell_cut(shape, new)
        return f"changes from {cut[0]} to {cut[1]}: {change}"
    if Counter(previous) == Counter(new):
        pinned = "" if info.preemptible else "not preemptible, "
        return f"stays on {_spell_allocation(info, shape, new)}: {pinned}{worth}"
    if len(previous) == len(new):
        return f"moves from {spell_nodes(previous)} to {spell_nodes(new)}: {change}"
    verb = "grows" if len(new) > len(previous) else "shrinks"
    return f"{verb} from {len(previous)} to {count(len(new), 'replica')}: {change}"


def why_nothing(
    info: JobInfo,
    nodes: Mapping[str, NodeInfo],
    free: Mapping[str, Mapping[str, int]],
    others: Others = NOBODY,
) -> str:
    """Explain what keeps a job from running, given the free resources of the nodes."""
    least = max(info.min_replicas, 1)
    open_nodes = usable_nodes(nodes)
    if not open_nodes:
        return "no node accepts new replicas"
    never = _misfit(info, nodes)
    if never is not None:  # the cluster has shrunk since its submission
        return never
    rooms: list[tuple[int, ReplicaShape, dict[str, Mapping[str, int]]]] = []
    for shape in info.all_shapes:
        left = {name: free[name] for name, node in open_nodes.items() if shape.runs_on(node)}
        rooms.append(
            (sum(count_fitting(shape.resources, has) for has in left.values()), shape, left)
        )
    holds, shape, left = max(rooms, key=lambda room: room[0])
    if not left:
        return f"no node that accepts new replicas has GPUs of type {shape.gpu_type}"
    asked = _spell_resources(shape.resources)
    if _speedup(shape, [""] * least, nodes) <= 0:
        return f"no batch size within its bounds works on {count(least, 'replica')}"
    if holds >= least:
        room = f"there is room for {count(least, 'replica')}"
        if least == 1:
            return f"{room}; {_why_not_given(info, others)}"
        return f"{room}, but only on nodes of another job that spans several"
    closed = _closed(shape, nodes)
    if least > 1:
        return f"needs {asked} on one node {least} times, there is room for {holds}{closed}"
    name, has = _largest(shape.resources, left)
    there = _spell_jobs(others.holders.get(name, ()))
    return f"needs {asked} free on one node, and {name}, the freest, has {has}{there}{closed}"


def _why_not_given(info: JobInfo, others: Others) -> str:
    # This job is one of them; thousands may wait, each with its reason.
    many = len(others.waiting) - 1
    if many < 1:
        return "the policy has not assigned it, and decides again at the next change"
    first = [job for job, its in others.waiting[: MOST_NAMED + 1] if its is not info]
    return f"{_first_of(first, many)} {'is' if many == 1 else 'are'} also waiting"


def _spell_jobs(names: Sequence[str]) -> str:
    return f" beside {_first_of(names, len(names))}" if names else ""


def _first_of(names: Sequence[str], many: int) -> str:
    more = many - MOST_NAMED
    shown = [*names[:MOST_NAMED], *([f"{more} more"] if more > 0 else [])]
    return f"{'job' if many == 1 else 'jobs'} {listing(shown)}"


def _closed(shape: ReplicaShape, nodes: Mapping[str, NodeInfo]) -> str:
    """Name the nodes that could hold a replica if they did not drain."""
    names = [
        name
        for name, node in nodes.items()
        if node.draining and shape.runs_on(node) and count_fitting(shape.resources, node.resources)
    ]
    if not names:
        return ""
    return f"; {', '.join(names)} {'drains' if len(names) == 1 else 'drain'}"


def _largest(
    resources: Mapping[str, int], nodes: Mapping[str, Mapping[str, int]]
) -> tuple[str, str]:
    """Return the node that comes closest to holding one replica, and its free resources."""

    def missing(name: str) -> float:
        return min(nodes[name].get(kind, 0) / need for kind, need in resources.items() if need > 0)

    name = max(nodes, key=missing)
    return name, _spell_resources({kind: nodes[name].get(kind, 0) for kind in resources})


def _speedup(shape: ReplicaShape, nodes: Sequence[str], infos: Mapping[str, NodeInfo]) -> float:
    speedup_fn = shape.speedup_at(network_level(nodes, infos))
    value = speedup_fn(np.array([len(set(nodes))]), np.array([len(nodes)]))
    return float(np.asarray(value).reshape(-1)[0])


def _spell_speedup(shape: ReplicaShape, nodes: Sequence[str], infos: Mapping[str, NodeInfo]) -> str:
    guessed = "" if shape.speedup_fn is not linear_speedup else " (assumed, not measured yet)"
    return f"speedup {_speedup(shape, nodes, infos):.2f}{guessed}"


def _spell_allocation(info: JobInfo, shape: ReplicaShape, nodes: Sequence[str]) -> str:
    replicas = _spell_cut(shape, nodes) if info.shapes else count(len(nodes), "replica")
    return f"{replicas} on {spell_nodes(nodes)}"


def _spell_cut(shape: ReplicaShape, nodes: Sequence[str]) -> str:
    return f"{count(len(nodes), 'replica')} of {count(shape.num_stages, 'stage')}"


def _spell_resources(resources: Mapping[str, int]) -> str:
    words = {"slots": "slot", "cpus": "cpu", "gpu_slots": "GPU slot", "cpu_slots": "CPU slot"}
    words |= {"wide_slots": "multi-stage slot"}
    parts = []
    for kind, amount in resources.items():
        if kind == "memory":
            parts.append(f"{amount / 2**30:.4g} GiB of memory")
        else:
            parts.append(count(amount, words.get(kind, kind)))
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)
