"""How short completion times could be if changes were free: a fluid model of Pollux's workloads.

    python benchmarks/jct/fluid.py ARTIFACT [--workloads 1,2,3,6] [--start 30] [--improve]

ARTIFACT is the folder `simulator` of petuum/adaptdl, branch osdi21-artifact. Jobs train at the true
rates of its traces, with the best batch size of each epoch. A job starts once, which takes
`--start` seconds; after that it has any number of GPUs, also fractional, anywhere, and a change
costs nothing. Every policy knows all rates and lengths of the present jobs, and nothing of future
ones. It decides at every arrival and completion, and every 60 s.

    weights a    `CompletionTime`'s: w = u · rank^a, the greatest sum of w · speedup
    improved a   one step of policy iteration from that: w is by how much a second of the job's work
                 less would shorten the sum of all jobs' times, with weights a from here on

Prints Markdown: averages against the artifact's Pollux, and makespans.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import jct
import numpy as np
from numpy.typing import NDArray

from pipollux_simulator import Experiment, Workload, make_nodes
from pipollux_simulator.applications.base import Application
from pipollux_simulator.engine.isolated import IsolatedTimes

Floats = NDArray[np.float64]
GPUS, INTERVAL = 64, 60.0
POWERS = (0.25, 0.5, 0.75, 1.0)


class Rates:
    """True rates of one application.

    Attributes:
        ends: progress at the end of each epoch, (E,).
        base: progress per second on one GPU in each epoch, (E,).
        steps: per epoch, the concave hull of speedup over GPUs as (slope, GPUs, speedup), the
        steepest first; values below the hull are reached by sharing time.
    """

    def __init__(self, app: Application, times: IsolatedTimes) -> None:
        epochs = range(app.max_epochs)
        rates = np.array([times.rates(app, gpus) for gpus in range(1, GPUS + 1)])
        self.ends: Floats = np.array([app.progress(epoch + 1) for epoch in epochs])
        self.base: Floats = rates[0]
        self.steps = [_hull(column / column[0]) for column in rates.T]

    def epoch(self, progress: float) -> int:
        """Return the epoch at some progress."""
        return min(int(np.searchsorted(self.ends, progress, side="right")), len(self.ends) - 1)


def _hull(speedups: Floats) -> Floats:
    """Return the concave hull, from 0 on: (segments, 3)."""
    hull = [(0, 0.0)]
    for point in enumerate(speedups.tolist(), 1):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], point):
            hull.pop()
        hull.append(point)
    pairs = itertools.pairwise(hull)
    return np.array([(_slope(a, b), b[0] - a[0], b[1] - a[1]) for a, b in pairs if b[1] > a[1]])


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


Curves = Sequence[Floats]
"""The steps of every job in its present epoch."""
Policy = Callable[[Curves, Floats], Floats]
"""Weights of jobs, by their curves and remaining seconds of work on one GPU."""


def share(curves: Curves, weights: Floats) -> Floats:
    """Return the speedups of the greatest weighted sum on all GPUs."""
    owner = np.repeat(np.arange(len(curves)), [len(curve) for curve in curves])
    slope, gpus, gain = np.concatenate(curves).T
    order = np.argsort(-weights[owner] * slope, kind="stable")
    before = np.cumsum(gpus[order]) - gpus[order]
    part = np.clip((GPUS - before) / gpus[order], 0.0, 1.0)
    total: Floats = np.bincount(owner[order], weights=part * gain[order], minlength=len(curves))
    return total


def by_rank(power: float) -> Policy:
    """Return `CompletionTime`'s weights."""

    def weights(curves: Curves, work: Floats) -> Floats:
        totals = [curve[:, 1:].cumsum(axis=0).T for curve in curves]
        load = len(curves) / GPUS
        unit = np.array([((1.0 + load * gpus) / speedup).min() for gpus, speedup in totals])
        rank = np.empty(len(curves))
        rank[np.argsort(-unit * work, kind="stable")] = np.arange(1, len(curves) + 1)
        return unit * rank**power

    return weights


def improved(power: float) -> Policy:
    """Return weights that are one step of policy iteration better than `by_rank`."""
    base = by_rank(power)

    def weights(curves: Curves, work: Floats) -> Floats:
        total = _total(curves, work, base)
        found = []
        for job, left in enumerate(work):
            less = min(max(0.02 * left, 1.0), 0.5 * left)
            shorter = work.copy()
            shorter[job] -= less
            found.append(max((total - _total(curves, shorter, base)) / less, 1e-9))
        return np.array(found)

    return weights


def _total(curves: Curves, work: Floats, policy: Policy) -> float:
    """Return the sum of the jobs' times from now on without further arrivals."""
    now = total = 0.0
    while work.size:
        speedup = share(curves, policy(curves, work))
        ends = np.divide(work, speedup, out=np.full_like(work, np.inf), where=speedup > 0)
        step = float(ends.min())
        now += step
        stays = ends > step * (1 + 1e-9) + 1e-9
        total += now * float((~stays).sum())
        curves = [curve for curve, kept in zip(curves, stays, strict=True) if kept]
        work = (work - speedup * step)[stays]
    return total


def simulate(
    jobs: Sequence[tuple[float, Rates]], policy: Policy, start: float
) -> tuple[float, float]:
    """Return the average completion time and the makespan of jobs, by arrival."""
    now, waiting, done = 0.0, list(range(len(jobs))), 0.0
    progress: dict[int, float] = {}
    weights, changed = np.empty(0), True
    while waiting or progress:
        if not progress:
            now = max(now, jobs[waiting[0]][0] + start)
        while waiting and jobs[waiting[0]][0] + start <= now + 1e-9:
            progress[waiting.pop(0)], changed = 0.0, True
        rates = [jobs[job][1] for job in progress]
        epochs = [rate.epoch(so_far) for rate, so_far in zip(rates, progress.values(), strict=True)]
        curves = [rate.steps[epoch] for rate, epoch in zip(rates, epochs, strict=True)]
        base = np.array([rate.base[epoch] for rate, epoch in zip(rates, epochs, strict=True)])
        left = np.array([rate.ends[-1] for rate in rates]) - np.array(list(progress.values()))
        if changed:
            weights, changed = policy(curves, left / base), False
        speed = base * share(curves, weights)
        ends = np.divide(left, speed, out=np.full_like(left, np.inf), where=speed > 0)
        step = min(INTERVAL, float(ends.min()))
        if waiting:
            step = min(step, jobs[waiting[0]][0] + start - now)
        now += step
        for job, rate, end in zip(list(progress), speed, ends, strict=True):
            progress[job] += rate * step
            if end <= step + 1e-9:
                del progress[job]
                done, changed = done + now - jobs[job][0], True
    return done / len(jobs), now - jobs[0][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--workloads", default=",".join(map(str, jct.WORKLOADS)))
    parser.add_argument("--start", type=float, default=30.0, help="seconds of a job's one start")
    parser.add_argument("--improve", action="store_true", help="with a step of policy iteration")
    options = parser.parse_args()
    numbers = [int(number) for number in options.workloads.split(",")]
    policies = {f"weights {power}": by_rank(power) for power in POWERS}
    if options.improve:
        policies |= {f"improved {power}": improved(power) for power in (0.5, 0.75)}
    print("\n".join(jct.head(["policy", *(f"workload {n}" for n in numbers), "mean"])))
    loaded = {number: load(options.artifact, number) for number in numbers}
    for label, policy in policies.items():
        cells, ratios = [], []
        for number in numbers:
            average, makespan = simulate(loaded[number], policy, options.start)
            ratios.append(
                average / jct.published_jct(options.artifact, "pollux", (1.0, number))["avg_jct_s"]
                - 1
            )
            cells.append(f"{average:.0f} ({ratios[-1]:+.1%}) / {makespan:.0f}")
        print("| " + " | ".join([label, *cells, f"{np.mean(ratios):+.1%}"]) + " |", flush=True)


def load(artifact: Path, number: int) -> list[tuple[float, Rates]]:
    """Return arrivals and true rates of a workload's jobs."""
    workload: Workload = jct.workload(artifact, (1.0, number))
    experiment = Experiment(make_nodes({"": (16, 4)}), traces=artifact / "traces")
    apps = experiment.applications(workload)
    times = IsolatedTimes(experiment.nodes, 0.0)
    rates = {name: Rates(app, times) for name, app in apps.items()}
    return sorted(
        ((job.time, rates[job.application]) for job in workload.jobs), key=lambda job: job[0]
    )


if __name__ == "__main__":
    main()
