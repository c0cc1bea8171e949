"""Time of policies for one decision, and the quality of their answers.

    OPENBLAS_NUM_THREADS=1 python benchmarks/policy-latency/policy_latency.py \
        [--rounds 5] [--limit 30] [--adaptdl-python PATH]

Every round draws a cluster's jobs and asks every policy in turn, each with its own copy of the
jobs, whose speedups are not computed yet:

    new      nothing is allocated, and every speedup is computed from the job's model
    cold     the same again, by a new policy: speedups are known
    steady   the answer of the first policy that searches, with a twentieth of the jobs replaced

Fitness is Pollux's (`FairSpeedup`, p = -1), for all policies. A policy that took longer than
`--limit` CPU seconds for a call is not asked again, at this or any larger size.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from questions import Allocations, Question, Size, make_jobs, replace_some

from pipollux_policies import ExactPolicy, FairSpeedup, JobInfo, PolluxPolicy

SIZES = {
    1: [Size(16, 4, 10), Size(16, 4, 40), Size(32, 8, 64), Size(128, 8, 256), Size(512, 8, 1024)],
    3: [Size(16, 4, 40), Size(128, 8, 256), Size(512, 8, 1024)],
}
STAGES = {1: (1,), 3: (1, 2, 4)}
CASES = ("new", "cold", "steady")


class Asked(Protocol):
    """A policy under test."""

    def __call__(self, question: Question, *, fresh: bool) -> tuple[Allocations, float, float]:
        """Return the answer, CPU and wall seconds; `fresh`: forget all earlier questions."""


class Ours:
    """A policy of this process."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._policy = make()

    def __call__(self, question: Question, *, fresh: bool) -> tuple[Allocations, float, float]:
        """Ask it."""
        if fresh:
            self._policy = self._make()
        cpu, wall = time.process_time(), time.perf_counter()
        answer = question.ask(self._policy)
        return answer, time.process_time() - cpu, time.perf_counter() - wall


class Published:
    """`adaptdl-sched`'s policy in a separate process."""

    def __init__(self, python: str) -> None:
        script = Path(__file__).with_name("adaptdl_policy.py")
        self._process = subprocess.Popen(
            [python, "-W", "ignore", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._seed = 0

    def __call__(self, question: Question, *, fresh: bool) -> tuple[Allocations, float, float]:
        """Ask it; speedups are passed as tables, so they are never part of the time."""
        assert self._process.stdin  # noqa: S101  # for the type
        assert self._process.stdout  # noqa: S101  # for the type
        self._seed += 1
        self._process.stdin.write(json.dumps(_as_json(question, fresh, self._seed)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("adaptdl-sched's policy failed; its message stands above")
        allocations, cpu, wall = json.loads(line)
        return allocations, cpu, wall


@dataclass
class Results:
    """Measurements of one policy on one size and case, a value per round."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    fitness: list[float] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    """Used slots."""
    changed: list[int] = field(default_factory=list)
    """Running jobs with a changed allocation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=30.0, help="CPU seconds of a call")
    parser.add_argument("--adaptdl-python", help="an interpreter that has adaptdl-sched")
    parser.add_argument("--largest", type=int, default=10**6, help="GPUs of the largest cluster")
    options = parser.parse_args()
    policies: dict[str, Asked] = {
        "`PolluxPolicy`": Ours(PolluxPolicy),
        "`ExactPolicy(FairSpeedup())`": Ours(lambda: ExactPolicy(FairSpeedup())),
        "`ExactPolicy()`": Ours(ExactPolicy),
    }
    if options.adaptdl_python:
        policies["adaptdl-sched 0.2.11"] = Published(options.adaptdl_python)
    for shapes, sizes in SIZES.items():
        asked = {
            name: policy
            for name, policy in policies.items()
            if shapes == 1 or "adaptdl" not in name
        }
        for size in sizes:
            if size.num_nodes * size.gpus <= options.largest:
                results = measure(size, STAGES[shapes], asked, options.rounds, options.limit)
                every = " or ".join(map(str, STAGES[shapes]))
                report(f"{size}, K = {every}", results)


def measure(
    size: Size, stages: tuple[int, ...], asked: dict[str, Asked], rounds: int, limit: float
) -> dict[str, dict[str, Results]]:
    """Ask all policies in turn, and drop from `asked` those that took too long."""
    results = {name: {case: Results() for case in CASES} for name in asked}
    for number in range(rounds):
        base: Allocations | None = None
        for name, policy in list(asked.items()):
            cold = Question(make_jobs(size, stages, number), size.nodes, {})
            if isinstance(policy, Published):
                answer, slow = _note(results[name]["cold"], policy, cold, limit, fresh=True)
            else:
                answer, slow = _note(results[name]["new"], policy, cold, limit, fresh=True)
                if not slow:
                    answer, slow = _note(results[name]["cold"], policy, cold, limit, fresh=True)
            if not slow:
                base = answer if base is None else base
                jobs, held = replace_some(cold.jobs, base, size, stages, number)
                steady = Question(jobs, size.nodes, held)
                steady.fitness({})  # so that the new jobs' speedups are known, too
                _, slow = _note(results[name]["steady"], policy, steady, limit, fresh=False)
            if slow:
                del asked[name]
    return results


def _note(
    to: Results, policy: Asked, question: Question, limit: float, *, fresh: bool
) -> tuple[Allocations, bool]:
    """Measure one call; return the answer, and whether it took too long."""
    answer, cpu, wall = policy(question, fresh=fresh)
    to.cpu.append(cpu)
    to.wall.append(wall)
    to.fitness.append(question.fitness(answer))
    to.slots.append(
        sum((getattr(held, "num_stages", None) or 1) * len(held) for held in answer.values())
    )
    moved = [sorted(held) != sorted(answer.get(name, ())) for name, held in question.base.items()]
    to.changed.append(sum(moved))
    return answer, cpu > limit


def report(title: str, results: Mapping[str, Mapping[str, Results]]) -> None:
    """Print medians, and ratios of the CPU times of neighbours."""
    print(f"\n{title}\n")
    print("| case | policy | CPU | wall | CPU / exact | fitness | fitness / exact | GPUs | moved |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in CASES:
        ours = results["`ExactPolicy(FairSpeedup())`"][case]
        for name, by_case in results.items():
            found = by_case[case]
            if not found.cpu:
                continue
            number = len(found.cpu)
            ratios = np.array(found.cpu) / np.array(ours.cpu[:number])
            reached = np.array(found.fitness) / np.array(ours.fitness[:number])
            print(
                f"| {case} | {name} | {_seconds(found.cpu)} | {_seconds(found.wall)} "
                f"| {np.median(ratios):.3g} ({ratios.min():.3g} to {ratios.max():.3g}) "
                f"| {np.median(found.fitness):.4f} | {reached.min():.4f} to {reached.max():.4f} "
                f"| {np.median(found.slots):.0f} | {np.median(found.changed):.0f} |"
            )
    sys.stdout.flush()


def _seconds(values: list[float]) -> str:
    middle = float(np.median(values))
    return f"{1e3 * middle:.1f} ms" if middle < 1 else f"{middle:.2f} s"


def _as_json(question: Question, fresh: bool, seed: int) -> dict[str, Any]:
    jobs = [
        (
            name,
            {
                "resources": dict(job.resources),
                "min_replicas": job.min_replicas,
                "max_replicas": job.max_replicas,
                "speedups": [_speedups(job, nodes) for nodes in range(3)],
            },
        )
        for name, job in question.jobs.items()
    ]
    return {
        "fresh": fresh,
        "seed": seed,
        "jobs": jobs,
        "nodes": [(name, dict(node.resources)) for name, node in question.nodes.items()],
        "base": {name: list(held) for name, held in question.base.items()},
    }


def _speedups(job: JobInfo, num_nodes: int) -> list[float]:
    """Return a job's speedups by R on some nodes, equal from two nodes on."""
    replicas = np.arange(job.max_replicas + 1)
    possible = (replicas >= num_nodes) & (num_nodes > 0)
    found = job.speedup_fn(np.maximum(num_nodes, 1), np.maximum(replicas, max(num_nodes, 1)))
    return [float(value) for value in np.where(possible, found, 0.0)]


if __name__ == "__main__":
    main()
