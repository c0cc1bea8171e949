"""Small clusters, and the policy's rules and objective written down a second time, plainly.

Nothing here uses the policy's own arrays: what is feasible and what it is worth is computed from
lists of node names, one loop at a time, as docs/policies.md states it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from pipollux_sched.policy import JobInfo, NodeInfo

Allocations = Mapping[str, Sequence[str]]
FLOOR = 0.01
TEMPLATE = NodeInfo({"slots": 4, "cpus": 8})


def scaling(serial: float, network: float = 0.1) -> Callable[[Any, Any], Any]:
    """Amdahl's law, and a loss for every replica once there are several nodes."""

    def speedup(num_nodes: Any, num_replicas: Any) -> Any:
        nodes, replicas = np.asarray(num_nodes), np.asarray(num_replicas, dtype=float)
        cost = 1 + serial * (replicas - 1) + network * serial * (nodes > 1) * replicas
        return np.where(replicas > 0, replicas / cost, 0.0)

    return speedup


@dataclass(frozen=True)
class Case:
    """One question to a policy."""

    jobs: dict[str, JobInfo]
    nodes: dict[str, NodeInfo]
    base: dict[str, list[str]]


def held(jobs: Mapping[str, JobInfo], allocations: Allocations) -> Counter[tuple[str, str]]:
    """How much of each resource is held on each node."""
    amounts: Counter[tuple[str, str]] = Counter()
    for name, allocation in allocations.items():
        for node in allocation:
            for kind, amount in jobs[name].resources.items():
                amounts[node, kind] += amount
    return amounts


def current(case: Case) -> dict[str, list[str]]:
    """What every job holds now, on nodes that are still there."""
    intact = {name: nodes for name, nodes in case.base.items() if set(nodes) <= case.nodes.keys()}
    return {name: intact.get(name, []) for name in case.jobs}


def is_pinned(case: Case, name: str) -> bool:
    here = case.base.get(name, [])
    return not case.jobs[name].preemptible and bool(here) and set(here) <= case.nodes.keys()


def violations(case: Case, allocations: Allocations) -> list[str]:
    """Every rule that allocations break, in words."""
    found = [f"no answer for {name}" for name in case.jobs.keys() - allocations.keys()]
    for (node, kind), amount in held(case.jobs, allocations).items():
        if node not in case.nodes:
            found.append(f"unknown node {node}")
        elif amount > case.nodes[node].resources.get(kind, 0):
            found.append(f"{node} gives {amount} {kind}")
    distributed: Counter[str] = Counter()
    for name, allocation in allocations.items():
        job, count = case.jobs[name], len(allocation)
        if is_pinned(case, name):
            if list(allocation) != case.base[name]:
                found.append(f"pinned {name} moved")
            continue
        if count and not max(job.min_replicas, 1) <= count <= job.max_replicas:
            found.append(f"{name} has {count} replicas")
        if len(set(allocation)) > 1:
            distributed.update(set(allocation))
    found += [f"{n} has {c} distributed jobs" for n, c in distributed.items() if c > 1]
    return found


def fitness(case: Case, allocations: Allocations) -> float:
    """The harmonic mean of the jobs' values, as docs/policies.md states it."""
    total: Counter[str] = Counter()
    for node in case.nodes.values():
        total.update(node.resources)
    terms = [
        1 / max(value(case, name, allocations.get(name, []), total), FLOOR) for name in case.jobs
    ]
    return len(terms) / sum(terms) if terms else 1.0


def value(case: Case, name: str, allocation: Sequence[str], total: Mapping[str, int]) -> float:
    job = case.jobs[name]
    share = max(
        need / total[kind] if total[kind] else math.inf
        for kind, need in job.resources.items()
        if need
    )
    fair = min(
        max(math.ceil(1 / share / len(case.jobs) - 1e-9), job.min_replicas, 1), job.max_replicas
    )
    largest = max(
        min(node.resources.get(kind, 0) // need for kind, need in job.resources.items() if need)
        for node in [*case.nodes.values(), TEMPLATE]
    )
    fair_speedup = float(job.speedup_fn(math.ceil(fair / max(largest, 1)), fair))
    speedup = float(job.speedup_fn(len(set(allocation)), len(allocation)))
    before = case.base.get(name, [])
    if before and Counter(before) != Counter(allocation):
        lost = job.num_restarts * job.restart_seconds
        speedup *= max(job.age - lost, 0) / (job.age + job.restart_seconds)
    return speedup / (fair_speedup or 1.0)


def all_allocations(case: Case) -> Iterator[dict[str, list[str]]]:
    """Every feasible allocation of the whole cluster."""
    names = list(case.jobs)
    options = [
        [case.base[name]] if is_pinned(case, name) else list(_rows(case, case.jobs[name]))
        for name in names
    ]
    for choice in itertools.product(*options):
        allocations = dict(zip(names, choice, strict=True))
        if not violations(case, allocations):
            yield allocations


def _rows(case: Case, job: JobInfo) -> Iterator[list[str]]:
    yield []
    for count in range(max(job.min_replicas, 1), job.max_replicas + 1):
        for row in itertools.combinations_with_replacement(case.nodes, count):
            if all(
                amount <= case.nodes[node].resources.get(kind, 0)
                for (node, kind), amount in held({"": job}, {"": row}).items()
            ):
                yield list(row)


def random_case(
    seed: int, *, max_nodes: int, max_jobs: int, max_slots: int = 4, max_replicas: int = 5
) -> Case:
    """Draw a cluster in which about half of the jobs run already."""
    rng = np.random.default_rng(seed)
    nodes = {
        f"n{n}": NodeInfo(
            {"slots": int(rng.integers(1, max_slots + 1)), "cpus": int(rng.integers(2, 9))},
            preemptible=bool(rng.random() < 0.2),
        )
        for n in range(rng.integers(1, max_nodes + 1))
    }
    jobs, base = {}, {}
    for j in range(rng.integers(1, max_jobs + 1)):
        least = int(rng.integers(0, 3))
        stages = int(rng.choice([1, 1, 2, 3]))
        jobs[f"j{j}"] = job = JobInfo(
            {"slots": stages, "cpus": int(rng.integers(0, 3))},
            scaling(rng.uniform(0, 0.6)),
            float(j),
            min_replicas=least,
            max_replicas=max(least, int(rng.integers(1, max_replicas + 1))),
            preemptible=bool(rng.random() < 0.75),
            num_stages=stages,
            age=float(rng.choice([0.0, 30.0, 300.0, 3000.0])),
            num_restarts=int(rng.integers(0, 3)),
        )
        wanted = [str(rng.choice(list(nodes)))] * max(least, 1)
        running = Case(jobs, nodes, {**base, f"j{j}": wanted})
        if rng.random() < 0.6 and not violations(running, current(running)):
            base[f"j{j}"] = wanted
        assert job.max_replicas >= least
    return Case(jobs, nodes, base)


def cases(max_nodes: int = 4, max_jobs: int = 5) -> st.SearchStrategy[Case]:
    """Random cases for hypothesis."""
    return st.integers(0, 2**31).map(
        lambda seed: random_case(
            seed, max_nodes=max_nodes, max_jobs=max_jobs, max_slots=6, max_replicas=8
        )
    )
