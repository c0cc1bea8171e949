"""Random clusters and jobs of fixed size, for policies to be measured against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipollux_policies import Allocation, JobInfo, NodeInfo, ReplicaShape, violations
from tests.policies.policy_cases import scaling

HOUR = 3600.0


@dataclass(frozen=True)
class World:
    """One question to a policy."""

    jobs: dict[Any, JobInfo]
    nodes: dict[Any, NodeInfo]
    base: dict[Any, Any]


def random_world(seed: int) -> World:
    """Mixed K, bounds, types of GPU, draining and broken nodes; about half of the jobs run."""
    rng = np.random.default_rng(seed)
    types = ["", "A", "B"][: int(rng.integers(1, 4))]
    nodes: dict[Any, NodeInfo] = {
        (n if rng.random() < 0.5 else f"n{n}"): NodeInfo(
            {"slots": int(rng.choice([2, 4, 4, 4, 8])), "cpus": int(rng.choice([4, 8, 64]))},
            preemptible=bool(rng.random() < 0.2),
            gpu_type=str(rng.choice(types)),
            draining=bool(rng.random() < 0.1),
            healthy=bool(rng.random() < 0.95),
        )
        for n in range(rng.integers(1, 6))
    }
    jobs: dict[Any, JobInfo] = {}
    base: dict[Any, Any] = {}
    for j in range(rng.integers(1, 9)):
        name: Any = j if rng.random() < 0.5 else f"j{j}"
        jobs[name] = job = _random_job(rng, types)
        for _ in range(int(rng.integers(0, 4))):
            _start_somewhere(rng, World(jobs, nodes, base), name, job)
    if rng.random() < 0.2:
        nodes.pop(list(nodes)[int(rng.integers(len(nodes)))])
    return World(jobs, nodes, base)


def _random_job(rng: np.random.Generator, types: list[str]) -> JobInfo:
    def shape(stages: int) -> ReplicaShape:
        return ReplicaShape(
            stages,
            {"slots": stages, "cpus": int(rng.integers(0, 3))},
            scaling(rng.uniform(0, 0.6)),
            gpu_type=str(rng.choice(types)) if rng.random() < 0.3 else None,
            max_replicas=int(rng.integers(1, 9)) if rng.random() < 0.3 else None,
        )

    own = shape(int(rng.choice([1, 1, 2, 3, 4])))
    least = int(rng.integers(0, 4))
    most = max(least, int(rng.integers(1, 10)))
    return JobInfo(
        own.resources,
        own.speedup_fn,
        float(rng.integers(0, 5)),
        min_replicas=least,
        max_replicas=most,
        preemptible=bool(rng.random() < 0.75),
        num_stages=own.num_stages,
        age=float(rng.choice([0.0, 30.0, 300.0, 3000.0])),
        num_restarts=int(rng.integers(0, 3)),
        gpu_type=own.gpu_type,
        shapes=tuple(shape(int(rng.choice([1, 2, 4]))) for _ in range(rng.integers(0, 3))),
        attained_service=float(rng.choice([0.0, 500.0, 5000.0, 60000.0])),
        remaining_work=float(rng.uniform(0, 5000)) if rng.random() < 0.7 else None,
        requested_replicas=int(rng.integers(1, 9)) if rng.random() < 0.6 else None,
    )


def _start_somewhere(rng: np.random.Generator, world: World, name: Any, job: JobInfo) -> None:
    if name in world.base:
        return
    shape = job.all_shapes[int(rng.integers(len(job.all_shapes)))]
    names = list(world.nodes)
    count = int(rng.integers(max(job.min_replicas, 1), job.max_replicas + 1))
    if rng.random() < 0.6:
        chosen = [names[int(rng.integers(len(names)))]] * min(count, 4)
    else:
        some = rng.permutation(len(names))[: int(rng.integers(2, 4))]
        chosen = [names[int(n)] for n in rng.choice(some, size=count)]
    allocation = Allocation(chosen, shape)
    # A node may have failed or be draining since then.
    then = {n: replace(node, draining=False, healthy=True) for n, node in world.nodes.items()}
    if not violations(world.jobs, then, {}, {**world.base, name: allocation}):
        world.base[name] = allocation if rng.random() < 0.8 else list(allocation)
        if violations(world.jobs, then, {}, world.base):
            del world.base[name]


NODE = NodeInfo({"slots": 4})


def fixed(created: float, replicas: int, stages: int = 1, **more: Any) -> JobInfo:
    """A job whose user asks for so many replicas."""
    return JobInfo(
        {"slots": stages},
        more.pop("speedup_fn", scaling(0)),
        created,
        min_replicas=more.pop("min_replicas", 1),
        max_replicas=more.pop("max_replicas", 64),
        num_stages=stages,
        requested_replicas=replicas,
        **more,
    )


def sizes(answer: Mapping[Any, Allocation]) -> dict[Any, int]:
    return {name: len(allocation) for name, allocation in answer.items()}
