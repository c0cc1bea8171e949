"""The cost of the fairness guarantee: completion times and fairness over F.

    python benchmarks/fairness/fairness.py DATA --results DIR [--only first|curve|others|elastic]
        [--found]

DATA holds `traces` and `workloads` of Pollux's public artifact. 16 nodes of 4 GPUs, a start takes
30 s; a round every 60 s and at every arrival, and jobs start with the measurements of their family,
both as under the scheduler. "elastic" is with elastic resizes at 1 s. Results are kept in DIR, one
file each, and not simulated again; with --found nothing is simulated. Prints Markdown.

Beside the worst job and the 99th percentile of all, the table has those of jobs that could be in
time at all. Others have a completion time alone on the empty cluster above 1.25 times that on their
equal share (`isolated`), because a start, measuring on one GPU first, or doubling takes too long.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipollux_simulator import (
    Experiment,
    KnownLength,
    Options,
    SimulationOutcome,
    Workload,
    make_nodes,
    measure,
    read_workload,
)
from pipollux_simulator.engine.experience import Experience

WORKLOADS = (1, 2, 3, 6)
CURVE = (2.0, 1.5, 1.1)
"""Values of F on the first and the last workload, beside none and 1.25."""
ELASTIC = 1.0
"""Seconds of an elastic resize."""
PROMISE = 1.25
"""F by which the table of all policies judges jobs."""


class Case(NamedTuple):
    """One simulation."""

    policy: str
    told: str
    fairness: float | None
    number: int
    rescale_seconds: float | None = None
    """Of an elastic resize; None: every change is a restart."""

    @property
    def file(self) -> str:
        """Name of the file with its result."""
        elastic = "" if self.rescale_seconds is None else f"-elastic-{self.rescale_seconds:g}"
        return f"{self.policy}-{self.told}-{self.fairness or 'off'}-{self.number}{elastic}.json"


def cases(only: str) -> Iterator[Case]:
    """Yield the simulations of a part, or of all parts."""
    for fairness in (None, PROMISE) if only in ("", "first") else ():
        for told in ("exact", "learned"):
            yield from (Case("exact", told, fairness, number) for number in WORKLOADS)
    for number in (WORKLOADS[-1], WORKLOADS[0]) if only in ("", "curve") else ():
        for told in ("exact", "learned"):
            yield from (Case("exact", told, fairness, number) for fairness in CURVE)
    for number in (WORKLOADS[0], WORKLOADS[-1]) if only in ("", "others") else ():
        yield Case("sia", "none", None, number)
    for fairness in (None, PROMISE) if only in ("", "elastic") else ():
        for told in ("exact", "learned"):
            yield from (Case("exact", told, fairness, number, ELASTIC) for number in WORKLOADS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--only", choices=("first", "curve", "others", "elastic"), default="")
    parser.add_argument("--found", action="store_true")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    if not options.found:
        for case in cases(options.only):
            if not (options.results / case.file).exists():
                save(options.results / case.file, simulate(options.data, case))
    found = {
        case: json.loads(path.read_text())
        for case in cases("")
        if (path := options.results / case.file).exists()
    }
    print(table(found))


def save(target: Path, row: dict[str, Any]) -> None:
    """Write a result atomically."""
    beside = target.with_suffix(".part")
    beside.write_text(json.dumps(row))
    beside.replace(target)


def setting(data: Path, case: Case) -> tuple[Experiment, Workload]:
    """Return the experiment and the workload of a case."""
    options = Options(
        known_length=KnownLength.parse(case.told),
        decides_at="arrivals",
        inherit_models=True,
        rescale_seconds=case.rescale_seconds,
    )
    nodes = make_nodes({"": (16, 4)})
    experiment = Experiment(nodes, options, data / "traces")
    path = data / "workloads" / f"workload-{case.number}.csv"
    return experiment, Workload(path.stem, tuple(read_workload(path)))


def simulate(data: Path, case: Case) -> dict[str, Any]:
    """Return the metrics of one simulation, and the fairness of every job."""
    experiment, workload = setting(data, case)
    promise = "" if case.fairness is None else f":fairness={case.fairness}"
    outcome = experiment.run(workload, f"{case.policy}{promise}")
    alone = floors(experiment, workload, outcome)
    jobs = [
        (job.name, job.isolated, job.jct, alone[job.name], job.num_restarts) for job in outcome.jobs
    ]
    return {**measure(outcome).to_dict(), "jobs": jobs}


def floors(
    experiment: Experiment, workload: Workload, outcome: SimulationOutcome
) -> dict[str, float]:
    """Return each job's time alone on the empty cluster, under the policy without a promise.

    It starts with the measurements of its application if one had completed when it arrived.
    """
    known: dict[tuple[str, bool], float] = {}
    for job in workload.jobs:
        if (job.application, False) not in known:
            experience = Experience()
            for warm_start in (False, True):
                one = Workload("alone", (replace(job, time=1.0),))
                (alone,) = experiment.run(one, "exact", experience=experience).jobs
                known[job.application, warm_start] = alone.jct
    ended: dict[str, float] = {}
    for done in outcome.jobs:
        first = ended.get(done.application, float("inf"))
        ended[done.application] = min(first, done.completed)
    return {
        job.name: known[job.application, ended[job.application] < job.arrived]
        for job in outcome.jobs
    }


HEAD = (
    *(
        "workload",
        "policy",
        "told",
        "an elastic resize",
        "F",
        "average JCT, s",
        "p99 JCT",
        "restarts",
    ),
    *("mean rho", "p99 rho", "worst rho", "rho > 1", "rho > F", "p99, could", "worst, could"),
    "rho > F, could",
)


def table(found: dict[Case, dict[str, Any]]) -> str:
    """Return a line per simulation; F is 1.25 where nothing is promised."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    told = {"exact": "exactly", "learned": "learned", "none": "–"}
    order = sorted(found, key=_place)
    for case in order:
        row = found[case]
        price = "a restart" if case.rescale_seconds is None else f"{case.rescale_seconds:g} s"
        base = found.get(case._replace(fairness=None, policy="exact"), row)
        against = f" ({row['avg_jct_s'] / base['avg_jct_s'] - 1:+.1%})" if case.fairness else ""
        bound = case.fairness or PROMISE
        rho = np.array([jct / isolated for _, isolated, jct, _, _ in row["jobs"]])
        could = np.array([alone <= bound * isolated for _, isolated, _, alone, _ in row["jobs"]])
        cells = [
            *(str(case.number), case.policy, told[case.told], price, f"{case.fairness or 'off'}"),
            *(f"{row['avg_jct_s']:.0f}{against}", f"{row['p99_jct_s']:.0f}"),
            *(f"{row['restarts_per_job']:.1f}", f"{rho.mean():.2f}"),
            *(f"{np.percentile(rho, 99):.2f}", f"{rho.max():.2f}", f"{(rho > 1).mean():.0%}"),
            f"{(rho > bound).sum()} of {rho.size}",
            *(f"{np.percentile(rho[could], 99):.2f}", f"{rho[could].max():.2f}"),
            f"{(rho[could] > bound).sum()} of {could.sum()}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _place(case: Case) -> tuple[object, ...]:
    """Return the sort key of a case."""
    promise = -(case.fairness or 99)
    return case.rescale_seconds or 0, case.number, case.policy, case.told, promise


if __name__ == "__main__":
    main()
