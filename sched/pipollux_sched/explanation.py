"""Why an allocation is what it is, in sentences that people understand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from .inventory import count_fitting, linear_speedup
from .policy import JobInfo, NodeInfo


def misfit(job: str, info: JobInfo, nodes: Mapping[str, NodeInfo]) -> str | None:
    """Say why a job could not run even if the cluster were empty; None if it could."""
    fitting = {name: count_fitting(info.resources, node.resources) for name, node in nodes.items()}
    asked = _spell_resources(info.resources)
    if not any(fitting.values()):
        name, has = _largest(info.resources, {n: node.resources for n, node in nodes.items()})
        return (
            f"job '{job}' fits no node: one replica needs {asked} on one node, and the largest "
            f"node, {name}, has {has}; ask for less (num_stages, resources) or add a larger node"
        )
    if sum(fitting.values()) < info.min_replicas:
        return (
            f"job '{job}' never runs: min_replicas is {info.min_replicas}, with {asked} each, and "
            f"the empty cluster holds {sum(fitting.values())}; lower min_replicas or add nodes"
        )
    return None


def explain(
    info: JobInfo,
    previous: Sequence[str],
    new: Sequence[str],
    nodes: Mapping[str, NodeInfo],
    free: Mapping[str, Mapping[str, int]],
) -> str:
    """Say in a short sentence why a job's allocation is what it is.

    Args:
        info: the job as the policy saw it.
        previous: its allocation until now.
        new: its allocation from now on.
        nodes: all nodes.
        free: what is left of them with all jobs' new allocations (`free_resources`).
    """
    if not new:
        verb = "is suspended" if previous else "waits"
        return f"{verb}: {_why_nothing(info, free)}"
    if not previous:
        return f"starts on {_spell_allocation(new)}: {_spell_speedup(info, new)}"
    gone = sorted(set(previous) - nodes.keys())
    if gone:
        return f"moves to {_spell_allocation(new)}: {', '.join(gone)} is gone"
    if Counter(previous) == Counter(new):
        pinned = "" if info.preemptible else "not preemptible, "
        return f"stays on {_spell_allocation(new)}: {pinned}{_spell_speedup(info, new)}"
    change = f"speedup {_speedup(info, previous):.2f} → {_spell_speedup(info, new, word='')}"
    before, after = len(previous), len(new)
    if before == after:
        return f"moves from {_spell_nodes(previous)} to {_spell_nodes(new)}: {change}"
    verb = "grows" if after > before else "shrinks"
    return f"{verb} from {before} to {_count(after, 'replica')}: {change}"


def _why_nothing(info: JobInfo, free: Mapping[str, Mapping[str, int]]) -> str:
    """Say what keeps a job from running, given what is left of the nodes."""
    least = max(info.min_replicas, 1)
    holds = sum(count_fitting(info.resources, left) for left in free.values())
    asked = _spell_resources(info.resources)
    if _speedup(info, [""] * least) <= 0:
        return f"no batch size within its bounds works on {_count(least, 'replica')}"
    if holds >= least:
        room = f"there is room for {_count(least, 'replica')}"
        if least == 1:
            return f"{room}, but it would gain next to nothing"
        return f"{room}, but only on nodes of another job that spans several"
    if least > 1:
        return f"needs {asked} on one node {least} times, there is room for {holds}"
    name, has = _largest(info.resources, free)
    return f"needs {asked} free on one node, and {name}, the freest, has {has}"


def _largest(
    resources: Mapping[str, int], nodes: Mapping[str, Mapping[str, int]]
) -> tuple[str, str]:
    """Return the node that comes closest to holding one replica, and what it has of it."""

    def missing(name: str) -> float:
        return min(nodes[name].get(kind, 0) / need for kind, need in resources.items() if need > 0)

    name = max(nodes, key=missing)
    return name, _spell_resources({kind: nodes[name].get(kind, 0) for kind in resources})


def _speedup(info: JobInfo, nodes: Sequence[str]) -> float:
    value = info.speedup_fn(np.array([len(set(nodes))]), np.array([len(nodes)]))
    return float(np.asarray(value).reshape(-1)[0])


def _spell_speedup(info: JobInfo, nodes: Sequence[str], word: str = "speedup ") -> str:
    guessed = "" if info.speedup_fn is not linear_speedup else " (assumed, not measured yet)"
    return f"{word}{_speedup(info, nodes):.2f}{guessed}"


def _spell_allocation(nodes: Sequence[str]) -> str:
    return f"{_count(len(nodes), 'replica')} on {_spell_nodes(nodes)}"


def _spell_nodes(nodes: Iterable[str]) -> str:
    return ", ".join(
        name if count == 1 else f"{name} ×{count}" for name, count in Counter(nodes).items()
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _spell_resources(resources: Mapping[str, int]) -> str:
    words = {"slots": "slot", "cpus": "cpu"}
    parts = []
    for kind, amount in resources.items():
        if kind == "memory":
            parts.append(f"{amount / 2**30:.4g} GiB of memory")
        else:
            parts.append(_count(amount, words.get(kind, kind)))
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)
