"""Measurements as a job of given parameters makes them, and what AdaptDL fits to some of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import adaptdl.goodput as oracle
import numpy as np
from numpy.typing import NDArray

from pipollux_perfmodel import GoodputFunction, PerfParams

Floats = NDArray[np.float64]

ALLOCATIONS = ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (2, 8), (4, 8), (4, 16))
SIZES = (8, 16, 32, 64, 128)


class Steps(NamedTuple):
    """Measured steps; the first five are the arguments of a fit. Arrays of shape (points,)."""

    num_nodes: Floats
    num_replicas: Floats
    atomic_bsz: Floats
    accum: Floats
    optim: Floats
    num_microbatches: Floats

    def change(self, rows: Any, **factors: float) -> Steps:
        """Return the same with some times multiplied."""
        changed = {name: getattr(self, name).copy() for name in factors}
        for name, factor in factors.items():
            changed[name][rows] *= factor
        return self._replace(**changed)


def measure(
    truth: PerfParams,
    allocations: Sequence[tuple[int, int]] = ALLOCATIONS,
    sizes: Sequence[int] = SIZES,
    microbatches: Sequence[int] = (1,),
    *,
    noise: float = 0.0,
    seed: int = 0,
) -> Steps:
    """Measure every combination; sizes are samples per micro-batch, noise is relative."""
    grid = np.array([(n, r, m * b, m) for n, r in allocations for m in microbatches for b in sizes])
    nodes, replicas, atomic_bsz, count = grid.T
    times = GoodputFunction(truth, (1.0, 1.0), 1).step_time(nodes, replicas, atomic_bsz, 0, count)
    jitter = np.exp(noise * np.random.default_rng(seed).normal(size=(2, len(grid))))
    accum, optim = times.accum_time * jitter[0], times.optim_time * jitter[1]
    return Steps(nodes, replicas, atomic_bsz, accum, optim, count)


def errors(params: PerfParams | Sequence[float], steps: Steps) -> Floats:
    """Return |log(predicted / measured)| of accumulation and optimizer steps, (2, points)."""
    times = GoodputFunction(params, (1.0, 1.0), 1).step_time(
        steps.num_nodes, steps.num_replicas, steps.atomic_bsz, 0, steps.num_microbatches
    )
    logs = np.log(times.accum_time / steps.accum), np.log(times.optim_time / steps.optim)
    return np.abs(np.stack(logs))


class Job(NamedTuple):
    """A job of AdaptDL's model, and where it was measured."""

    truth: PerfParams
    allocations: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]


@functools.cache
def random_jobs(count: int) -> tuple[Job, ...]:
    """Draw jobs, measured on some of the allocations with some of the batch sizes."""
    rng = np.random.default_rng(7)
    jobs = []
    for _ in range(count):
        alpha_c = np.exp(rng.uniform(np.log(0.01), np.log(0.5)))
        beta_c = alpha_c * np.exp(rng.uniform(np.log(0.01), np.log(0.3)))
        alpha_r = alpha_c * rng.uniform(0.1, 1)
        alpha_n = alpha_r * rng.uniform(1, 4)
        beta_n, beta_r = np.array([alpha_n, alpha_r]) * rng.uniform(0, 0.2, 2)
        seven = alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, rng.uniform(1, 3)
        some, few = (
            sorted(rng.choice(len(values), rng.integers(1, len(values) + 1), replace=False))
            for values in (ALLOCATIONS, SIZES)
        )
        jobs.append(
            Job(
                PerfParams(*map(float, seven)),
                tuple(ALLOCATIONS[i] for i in some),
                tuple(SIZES[i] for i in few),
            )
        )
    return tuple(jobs)


@functools.cache
def their_fit(job: Job, noise: float = 0.0) -> tuple[float, ...]:
    """Return AdaptDL's fit; the gradient of its loss divides by zero where a fit is perfect."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = oracle.fit_perf_params(*measure(job.truth, *job[1:], noise=noise)[:5])
    return tuple(map(float, found))
