"""Completion times under what a scheduler has: decisions at arrivals, models that jobs inherit.

    python benchmarks/jct/as_scheduler.py ARTIFACT --results DIR [--workloads 1,2] [--found]

ARTIFACT is the folder `simulator` of petuum/adaptdl, branch osdi21-artifact. `ExactPolicy` in the
simulator of Pipollux decides in rounds of 60 s and at every arrival, jobs begin with what the last
completed one of their family measured, and a start takes 30 s; live changes cost a restart, or 1 s.
It is told exactly how long jobs still train, or learns it. In the artifact's own simulator
(`in_artifact`, which needs pandas) it learns lengths and jobs inherit models too, but decisions are
made in rounds alone. Averages, p99 and makespans are compared with those of the artifact's Pollux,
which decides in rounds, with restarts of 30 s. What was simulated is kept in DIR, a file each, and
not simulated again; with --found nothing is simulated. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import in_artifact
import jct
import numpy as np

from pipollux_sched.simulator import Experiment, KnownLength, Options, make_nodes, measure

POLICY = "exact"
TOLD = {"exact": "exactly", "learned": "learned"}


class Case(NamedTuple):
    """What the policy is told, and what it is simulated with."""

    told: str
    rescale_seconds: float | None
    """None: a live change costs a restart."""
    in_artifact: bool = False

    @property
    def name(self) -> str:
        """Part of the name of its files."""
        where = "artifact" if self.in_artifact else f"{self.rescale_seconds or 'restart'}"
        return f"scheduler-{self.told}-{where}"

    @property
    def title(self) -> str:
        """Cells of its row."""
        live = "a restart: 30 s" if self.rescale_seconds is None else f"{self.rescale_seconds:g} s"
        where = "the artifact's" if self.in_artifact else "Pipollux's"
        return f"{TOLD[self.told]} | {live} | {where}"


CASES = (
    Case("exact", None),
    Case("exact", 1.0),
    Case("learned", None),
    Case("learned", 1.0),
    Case("learned", None, in_artifact=True),
)
METRICS = {"avg_jct_s": "average JCT", "p99_jct_s": "p99", "makespan_s": "makespan"}


def main() -> None:
    """Simulate what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--workloads", default=",".join(map(str, jct.WORKLOADS)))
    parser.add_argument("--only", default="", help="cases whose names begin so, by commas")
    parser.add_argument("--found", action="store_true")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    numbers = [int(number) for number in options.workloads.split(",")]
    chosen = [case for case in CASES if case.name.startswith(tuple(options.only.split(",")))]
    for number in numbers if not options.found else ():
        for case in chosen:
            target = options.results / f"{case.name}-{number}.json"
            if not target.exists():
                beside = target.with_suffix(".part")
                beside.write_text(json.dumps(simulate(options.artifact, number, case)))
                beside.replace(target)
    for metric, title in METRICS.items():
        print(table(options.artifact, options.results, numbers, metric, title))


def simulate(artifact: Path, number: int, case: Case) -> dict[str, Any]:
    """Simulate one case."""
    known_length = KnownLength.parse(case.told)
    if case.in_artifact:
        path = artifact / "workloads" / f"workload-{number}.csv"
        return in_artifact.run(artifact, path, POLICY, known_length, inherit_models=True)
    options = Options(
        rescale_seconds=case.rescale_seconds,
        known_length=known_length,
        decides_at="arrivals",
        inherit_models=True,
    )
    experiment = Experiment(make_nodes({"": (16, 4)}), options, artifact / "traces")
    return measure(experiment.run(jct.workload(artifact, (1.0, number)), POLICY)).to_dict()


def table(artifact: Path, results: Path, numbers: list[int], metric: str, title: str) -> str:
    """Return a line for every case, with what it is against Pollux's own in brackets."""
    base = [jct.published_jct(artifact, "pollux", (1.0, number))[metric] for number in numbers]
    names = [f"workload {number}" for number in numbers]
    lines = jct.head([f"{title}, s: told", "a live change costs", "simulator", *names, "mean"])
    lines.append("| Pollux's own | – | the artifact's | " + " | ".join(f"{b:.0f}" for b in base))
    lines[-1] += " | |"
    for case in CASES:
        paths = [results / f"{case.name}-{number}.json" for number in numbers]
        if not all(path.exists() for path in paths):
            continue
        found = [json.loads(path.read_text())[metric] for path in paths]
        ratios = np.array(found) / np.array(base)
        cells = [f"{one:.0f} ({ratio - 1:+.1%})" for one, ratio in zip(found, ratios, strict=True)]
        lines.append(f"| {case.title} | {' | '.join(cells)} | {ratios.mean() - 1:+.1%} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
