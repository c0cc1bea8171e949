"""The value of known job lengths for `ExactPolicy`, here and in the artifact.

    python benchmarks/jct/told.py ARTIFACT --results DIR [--found]

ARTIFACT is the folder `simulator` of petuum/adaptdl, branch osdi21-artifact. Every workload is
simulated with job lengths that are known, known within a factor of two, unknown, and estimated from
completed jobs; in the simulator of Pipollux, with its own fit of step times and with AdaptDL's, and
in the artifact's own, unchanged (`in_artifact`, which needs pandas), there also with jobs that
start with the measurements of their family, and with jobs and decisions as ours
(`pipollux_in_artifact`). Results are kept in DIR, one file each, and not simulated again; with
--found nothing is simulated. Prints Markdown, without rows that have no result.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import in_artifact
import jct
import numpy as np
import pipollux_in_artifact
from pipollux_in_artifact import Prices

from pipollux_perfmodel import fit_like_adaptdl, fit_perf_params
from pipollux_simulator import Experiment, KnownLength, Options, make_nodes, measure

POLICY = "exact"
TOLD = {
    "exact": "exactly",
    "2": "within a factor of two",
    "none": "not at all",
    "learned": "learned",
}
Row = dict[str, Any]
Run = Callable[[Path, int, KnownLength], Row]


def ours(fit: Any) -> Run:
    """Return a function that simulates a workload here, with this fit."""

    def run(artifact: Path, number: int, known_length: KnownLength) -> Row:
        options = Options(known_length=known_length)
        nodes = make_nodes({"": (16, 4)})
        experiment = Experiment(nodes, options, artifact / "traces", fit=fit)
        return measure(experiment.run(jct.workload(artifact, (1.0, number)), POLICY)).to_dict()

    return run


def theirs(*, inherit_models: bool) -> Run:
    """Return a function that simulates a workload in the artifact."""

    def run(artifact: Path, number: int, known_length: KnownLength) -> Row:
        path = artifact / "workloads" / f"workload-{number}.csv"
        return in_artifact.run(artifact, path, POLICY, known_length, inherit_models=inherit_models)

    return run


def whole(prices: Prices) -> Run:
    """Return a function that simulates a workload in the artifact, with our models of jobs."""

    def run(artifact: Path, number: int, known_length: KnownLength) -> Row:
        path = artifact / "workloads" / f"workload-{number}.csv"
        return pipollux_in_artifact.run(artifact, path, POLICY, known_length, prices)

    return run


WHERE: dict[str, tuple[str, Run]] = {
    "here": ("Pipollux's simulator", ours(fit_perf_params)),
    "here-adaptdl": ("Pipollux's simulator, AdaptDL's fit", ours(fit_like_adaptdl)),
    "artifact": ("the artifact's simulator", theirs(inherit_models=False)),
    "artifact-heirs": (
        "the artifact's simulator, models inherited",
        theirs(inherit_models=True),
    ),
    "artifact-pipollux": (
        "the artifact's simulator, jobs and decisions as ours",
        whole(Prices()),
    ),
    "artifact-elastic": (
        "the same, with elastic resizes at 1 s",
        whole(Prices(rescale_seconds=1.0)),
    ),
    "artifact-measured": (
        "the same, and starts at 10 s",
        whole(Prices(start_seconds=10.0, rescale_seconds=1.0)),
    ),
}


def main() -> None:
    """Simulate missing results, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--workloads", default=",".join(map(str, jct.WORKLOADS)))
    parser.add_argument("--where", default=",".join(WHERE))
    parser.add_argument("--told", default=",".join(TOLD))
    parser.add_argument("--found", action="store_true")
    options = parser.parse_args()
    if not options.found:
        options.results.mkdir(parents=True, exist_ok=True)
        for number in map(int, options.workloads.split(",")):
            for where in options.where.split(","):
                for told in options.told.split(","):
                    simulate(options.artifact, options.results, where, told, number)
    print(table(options.artifact, options.results))


def simulate(artifact: Path, results: Path, where: str, told: str, number: int) -> None:
    """Simulate one case, unless its file exists."""
    target = file(results, where, told, number)
    if not target.exists():
        jct.save(target, WHERE[where][1](artifact, number, KnownLength.parse(told)))


def file(results: Path, where: str, told: str, number: int) -> Path:
    return results / f"told-{where}-{told}-{number}.json"


def table(artifact: Path, results: Path) -> str:
    """Return average completion times, and their ratios to Pollux's own."""
    base = [jct.published_jct(artifact, "pollux", (1.0, n))["avg_jct_s"] for n in jct.WORKLOADS]
    lines = jct.head(["told", "where", *(f"workload {n}" for n in jct.WORKLOADS), "mean"])
    for told, words in TOLD.items():
        for where, (title, _) in WHERE.items():
            paths = [file(results, where, told, number) for number in jct.WORKLOADS]
            found = [json.loads(path.read_text()) if path.exists() else None for path in paths]
            if any(found):
                lines.append("| " + " | ".join([words, title, *cells(found, base)]) + " |")
    return "\n".join(lines)


def cells(found: Sequence[Row | None], base: Sequence[float]) -> list[str]:
    """Return the cells of one row: averages, and their ratios to the artifact's Pollux."""
    pairs = list(zip(found, base, strict=True))
    ratios = [row["avg_jct_s"] / one for row, one in pairs if row]
    shown = [
        f"{row['avg_jct_s']:.0f} ({row['avg_jct_s'] / one - 1:+.1%})" if row else "–"
        for row, one in pairs
    ]
    mean = f"{np.mean(ratios) - 1:+.1%}" if len(ratios) == len(base) else "–"
    return [*shown, mean]


if __name__ == "__main__":
    main()
