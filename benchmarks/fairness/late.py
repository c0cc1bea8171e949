"""Why jobs are late: the causes of their waiting, and the effects of a promise on them.

    python benchmarks/fairness/late.py DATA [--workload 6] [--told exact|learned] [--fairness 1.25]

DATA and the simulation are as for `fairness.py`; --told selects known or estimated job lengths. In
every decision with promises, the policy also decides without them. A job with a greater speedup due
to promises was helped, one with less was hurt, and one that changes and would have stayed without
them was moved. Prints a line for all jobs, and some lines per job that is later than F times, or
1.25 times where nothing is promised.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from fairness import Case, setting  # same folder

from pipollux_policies import (
    CompletionTime,
    ExactPolicy,
    JobInfo,
    NodeInfo,
    fair_standings,
    shape_of,
)
from pipollux_policies.allocations.allocation import Allocation
from pipollux_policies.exact.configurations import build_instance
from pipollux_simulator import (
    Cluster,
    IsolatedTimes,
    SimulationOutcome,
    outcome,
)

BOUND = 1.25
"""Without promises."""


class Moment(NamedTuple):
    """One decision about one job."""

    age: float
    slots: int
    changes: bool
    """Whether it held something, and gets something else."""
    first: bool
    """Whether it has a promise."""
    helped: float
    """Speedup with the promise minus that without it."""
    moved: bool
    """Whether it would have stayed without the promise."""
    alone: float
    """T, as predicted."""
    rho: float
    """As predicted with its equal share from now on."""
    most: int
    """Its maximum replicas."""


@dataclass
class Watched:
    """The exact policy, which records the effects of its promises."""

    fairness: float | None
    bound: float
    """A job with a greater rho is late."""
    moments: dict[str, list[Moment]] = field(default_factory=lambda: defaultdict(list))
    adapts_batch_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._objective = CompletionTime(fairness=self.fairness)
        self._policy = ExactPolicy(self._objective)
        self._without = ExactPolicy()

    def allocate_job(self, *_: Any) -> Any:
        """Place nothing between decisions."""
        raise NotImplementedError

    def optimize(
        self,
        jobs: Mapping[Any, JobInfo],
        nodes: Mapping[Any, NodeInfo],
        base: Mapping[Any, Sequence[Any]],
        template: NodeInfo,
    ) -> tuple[dict[Any, Allocation], int]:
        """Allocate as the exact policy does."""
        answer, number = self._policy.optimize(jobs, nodes, base, template)
        promised: set[Any] = set()
        other = answer
        if self.fairness is not None:
            instance = build_instance(jobs, nodes, base, template)
            places = self._objective.promise(instance).places
            promised = {instance.jobs[job].name for job in places}
            if promised:
                other, _ = self._without.optimize(jobs, nodes, base, template)
        stands = fair_standings(jobs, nodes, base, template, self.fairness or self.bound)
        for name, job in jobs.items():
            before, after = list(base.get(name, ())), list(answer[name])
            stand = stands.get(name)
            self.moments[name].append(
                Moment(
                    age=job.age,
                    slots=len(after) * job.num_stages,
                    changes=bool(before) and before != after,
                    first=name in promised,
                    helped=_speedup(job, answer[name], nodes) - _speedup(job, other[name], nodes),
                    moved=bool(before) and before != after and list(other[name]) == before,
                    alone=stand.alone if stand else 0.0,
                    rho=stand.fairness if stand else 0.0,
                    most=job.max_replicas,
                )
            )
        return answer, number


def _speedup(job: JobInfo, held: Allocation, nodes: Mapping[Any, NodeInfo]) -> float:
    if not held:
        return 0.0
    shape = shape_of(job, held, nodes)
    return float(shape.speedup_fn(len(set(held)), len(held)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--workload", type=int, default=6)
    parser.add_argument("--told", default="exact")
    parser.add_argument("--fairness", type=float)
    options = parser.parse_args()
    watched = Watched(options.fairness, options.fairness or BOUND)
    result = simulate(options.data, options.workload, options.told, watched)
    print(summary(result, watched, options))
    for line in late(result, watched):
        print(line)


def simulate(data: Path, number: int, told: str, policy: Watched) -> SimulationOutcome:
    """Simulate as `fairness.py` does."""
    experiment, workload = setting(data, Case("exact", told, policy.fairness, number))
    nodes, options = experiment.nodes, experiment.options
    applications = experiment.applications(workload)
    found = Cluster(workload.jobs, applications, nodes, policy, options).run()
    alone = IsolatedTimes(nodes, options.restart_seconds)
    return outcome(found, applications, alone, workload=workload.name, policy="exact", seed=0)


def summary(result: SimulationOutcome, watched: Watched, options: argparse.Namespace) -> str:
    """Return the totals of all jobs."""
    rho = np.array([job.finish_time_fairness for job in result.jobs])
    jct = np.array([job.jct for job in result.jobs])
    restarts = np.mean([job.num_restarts for job in result.jobs])
    moments = [moment for job in result.jobs for moment in watched.moments[job.name]]
    first = np.mean([moment.first for moment in moments])
    moved = sum(moment.moved for moment in moments) / len(result.jobs)
    return json.dumps(
        {
            "workload": options.workload,
            "told": options.told,
            "F": options.fairness,
            "avg": round(float(jct.mean())),
            "late": int((rho > watched.bound).sum()),
            "worst": round(float(rho.max()), 2),
            "mean_rho": round(float(rho.mean()), 2),
            "restarts": round(float(restarts), 2),
            "first": round(float(first), 3),
            "moved": round(float(moved), 2),
        }
    )


def late(result: SimulationOutcome, watched: Watched) -> list[str]:
    """Return lines on every job that is late, the latest first."""
    lines = []
    for job in sorted(result.jobs, key=lambda job: -job.finish_time_fairness):
        if job.finish_time_fairness <= watched.bound:
            break
        moments = watched.moments[job.name]
        held = sum(span.end - span.start for span in job.history)
        wait = job.started - job.arrived
        spans = [f"{s.start - job.arrived:.0f}:{len(s.nodes)}" for s in job.history[:14]]
        first = [m for m in moments if m.first]
        helped = [m for m in moments if m.helped > 1e-9]
        hurt = [m for m in moments if m.helped < -1e-9]
        told = [moments[int(part * (len(moments) - 1))] for part in (0, 0.25, 0.5, 0.75, 1)]
        lines += [
            f"{job.name}: rho {job.finish_time_fairness:.2f}, {job.jct:.0f} s, alone "
            f"{job.isolated:.0f} s; waited {wait:.0f} s to start and "
            f"{job.jct - wait - held:.0f} s later, {job.num_restarts} restarts",
            f"    replicas from then on: {' '.join(spans)}",
            f"    {len(moments)} decisions: first in {len(first)}, helped in {len(helped)}, hurt "
            f"in {len(hurt)}, moved by the promise {sum(m.moved for m in moments)} times, of which "
            f"{sum(m.moved and not m.first for m in moments)} for others",
            "    predicted alone (and rho): "
            + ", ".join(f"{m.age:.0f} s: {m.alone:.0f} ({m.rho:.2f})" for m in told),
        ]
    return lines


if __name__ == "__main__":
    main()
