"""Synthetic clusters and jobs, the same for every policy, and Pollux's fitness of an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipollux_perfmodel import GoodputFunction, PerfParams, SpeedupFunction
from pipollux_perfmodel.timing.params import even_shares
from pipollux_policies import JobInfo, NodeInfo, ReplicaShape, shape_of
from pipollux_policies.pollux.arrays import build_cluster
from pipollux_policies.pollux.problem import AllocationProblem

MOST_REPLICAS = 64
INIT_BATCH_SIZE, MAX_BATCH_SIZE = 128, 4096
Allocations = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Size:
    """A cluster and its load."""

    num_nodes: int
    gpus: int
    """GPUs per node."""
    num_jobs: int
    domains: tuple[int, ...] = ()
    """Nodes per domain of each network level below the highest, such as rack and zone. Each level
    costs a job four times as much as the one below."""

    def __str__(self) -> str:
        gpus = self.num_nodes * self.gpus
        return f"{gpus} GPUs ({self.num_nodes} x {self.gpus}), {self.num_jobs} jobs"

    @property
    def nodes(self) -> dict[str, NodeInfo]:
        """All of one kind."""
        return {
            f"n{n:04}": NodeInfo(
                {"slots": self.gpus}, topology=tuple(f"d{n // size}" for size in self.domains[::-1])
            )
            for n in range(self.num_nodes)
        }


@dataclass(frozen=True)
class Question:
    """The input of a policy."""

    jobs: dict[str, JobInfo]
    nodes: dict[str, NodeInfo]
    base: Allocations

    def ask(self, policy: Any) -> Allocations:
        """Return a policy's answer."""
        template = next(iter(self.nodes.values()))
        answer: Allocations = policy.optimize(self.jobs, self.nodes, self.base, template)[0]
        return answer

    def fitness(self, allocations: Allocations) -> float:
        """Return the harmonic mean of speedups over the fair share, with restart factors."""
        template = next(iter(self.nodes.values()))
        cluster = build_cluster(self.jobs, self.nodes, self.base, template, 0)
        state = np.zeros_like(cluster.base)
        column = {name: n for n, name in enumerate(cluster.node_names)}
        for j, name in enumerate(cluster.job_names):
            held = allocations.get(name, ())
            shape = shape_of(self.jobs[name], held, self.nodes)
            row = next(i for i in cluster.spans[j] if cluster.shapes[i] is shape)
            for node in held:
                state[row, column[node]] += 1
        return float(AllocationProblem(cluster).fitness(state[None])[0])


def make_jobs(size: Size, stages: Sequence[int], seed: int, first: int = 0) -> dict[str, JobInfo]:
    """Draw jobs, deterministic for given arguments, whose speedups are not computed yet.

    `stages` are all K of a job, `first` the number of the first job.
    """
    numbers = range(first, first + size.num_jobs)
    levels = len(size.domains)
    return {
        f"j{n:05}": _make_job(n, stages, np.random.default_rng([seed, n]), levels) for n in numbers
    }


def replace_some(
    jobs: Mapping[str, JobInfo],
    allocations: Allocations,
    size: Size,
    stages: Sequence[int],
    seed: int,
) -> tuple[dict[str, JobInfo], dict[str, Sequence[str]]]:
    """Replace a twentieth of the jobs by new ones; the others hold what they got."""
    gone = size.num_jobs // 20
    names = list(jobs)
    new = list(make_jobs(size, stages, seed, size.num_jobs).items())[:gone]
    kept = {name: jobs[name] for name in names[gone:]}
    held = {name: allocations[name] for name in kept if allocations.get(name)}
    return kept | dict(new), held


def _make_job(
    number: int, stages: Sequence[int], rng: np.random.Generator, levels: int = 0
) -> JobInfo:
    seconds = rng.uniform(0.02, 0.4)
    gradients = 1.0, float(rng.uniform(1, 50))
    age, restarts = float(rng.uniform(60, 7200)), int(rng.integers(0, 4))
    work = float(rng.uniform(1e3, 1e5))
    base = _goodput_fn(seconds, gradients, 1).optimize(
        1, 1, max_batch_size=MAX_BATCH_SIZE, atomic_bsz_range=(16, 256), accumulation=True
    )
    own, *further = [_shape(seconds, gradients, count, float(base[0]), levels) for count in stages]
    return JobInfo(
        own.resources,
        own.speedup_fn,
        float(number),
        min_replicas=0,
        max_replicas=MOST_REPLICAS,
        num_stages=own.num_stages,
        age=age,
        num_restarts=restarts,
        remaining_work=work,
        shapes=tuple(further),
    )


def _shape(
    seconds: float,
    gradients: tuple[float, float],
    num_stages: int,
    base_goodput: float,
    levels: int = 0,
) -> ReplicaShape:
    speedup_fn = SpeedupFunction(
        _goodput_fn(seconds, gradients, num_stages, levels),
        MAX_BATCH_SIZE,
        (16, 256),
        accumulation=True,
        num_microbatches=1 if num_stages == 1 else (2 * num_stages, 4 * num_stages),
        base_goodput=base_goodput,
    )
    return ReplicaShape(num_stages, {"slots": num_stages}, speedup_fn)


def _goodput_fn(
    seconds: float, gradients: tuple[float, float], num_stages: int, levels: int = 0
) -> GoodputFunction:
    """Equal stages: each computes for, and exchanges, a K-th of the whole."""
    forward, backward = even_shares(num_stages)
    network = seconds / num_stages
    params = PerfParams(
        alpha_c=seconds,
        beta_c=seconds / 40,
        alpha_n=network / 3,
        beta_n=network / 50,
        alpha_r=network / 5,
        beta_r=network / 80,
        gamma=1.3,
        forward_shares=forward,
        backward_shares=backward,
        alpha_levels=tuple(network / 3 * 4**above for above in range(1, levels + 1)),
        beta_levels=tuple(network / 50 * 4**above for above in range(1, levels + 1)),
    )
    return GoodputFunction(params, gradients, INIT_BATCH_SIZE)
