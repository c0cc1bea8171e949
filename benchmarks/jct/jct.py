"""Job completion times under every policy, beside those of Pollux's public artifact.

    python benchmarks/jct/jct.py ARTIFACT [--results DIR] [--processes 2] [--policies exact,pollux]
    python benchmarks/jct/jct.py ARTIFACT --results DIR --found

ARTIFACT is the folder `simulator` of petuum/adaptdl, branch osdi21-artifact: `traces`, `workloads`,
`workloads-0.5` and so on, and the job completion times in `results-jobload`. 16 nodes of 4 GPUs.
Results are kept in DIR, one file each, and not simulated again; with --found nothing is simulated,
and missing results are dashes. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipollux_policies import POLICIES
from pipollux_simulator import (
    Experiment,
    Workload,
    make_nodes,
    measure,
    read_workload,
    run_pairs,
)

WORKLOADS = (1, 2, 3, 6)
LOADS = (0.5, 1.0, 1.5, 2.0)
LOADED = 6
"""The workload for other loads."""
PUBLISHED = ("pollux", "tiresias", "optimus")

Case = tuple[float, int]


def main() -> None:
    """Simulate missing results, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--found", action="store_true")
    options = parser.parse_args()
    policies = options.policies.split(",")
    cases = [(1.0, number) for number in WORKLOADS]
    cases += [(load, LOADED) for load in LOADS if load != 1.0]
    with tempfile.TemporaryDirectory() as scratch:
        results = options.results or Path(scratch)
        results.mkdir(parents=True, exist_ok=True)
        if not options.found:
            simulate(options.artifact, cases, policies, results, options.processes)
        found = {
            (policy, *case): json.loads(path.read_text())
            for policy in policies
            for case in cases
            if (path := _file(results, policy, case)).exists()
        }
    published = {
        (name, *case): published_jct(options.artifact, name, case)
        for name in PUBLISHED
        for case in cases
    }
    print(_workload_table(policies, found, published))
    print(_load_table(policies, found, published))
    print(_detail_table(policies, found))


def simulate(
    artifact: Path, cases: Sequence[Case], policies: Sequence[str], results: Path, processes: int
) -> None:
    """Run every policy on every case that has no file yet, several at a time."""
    experiment = Experiment(make_nodes({"": (16, 4)}), traces=artifact / "traces")
    missing = [
        (case, policy)
        for policy in policies
        for case in cases
        if not _file(results, policy, case).exists()
    ]
    for begin in range(0, len(missing), processes):
        batch = missing[begin : begin + processes]
        pairs = [(workload(artifact, case), policy) for case, policy in batch]
        outcomes = run_pairs(experiment, pairs, lambda *_: None, processes)
        for (case, policy), outcome in zip(batch, outcomes, strict=True):
            save(_file(results, policy, case), measure(outcome).to_dict())


def save(target: Path, row: Any) -> None:
    """Write a result atomically."""
    beside = target.with_suffix(".part")
    beside.write_text(json.dumps(row))
    beside.replace(target)


def workload(artifact: Path, case: Case) -> Workload:
    load, number = case
    folder = "workloads" if load == 1.0 else f"workloads-{load}"
    path = artifact / folder / f"workload-{number}.csv"
    return Workload(f"{folder}/{path.stem}", tuple(read_workload(path)))


def _file(results: Path, policy: str, case: Case) -> Path:
    return results / f"{policy}-{case[0]}-{case[1]}.json"


def published_jct(artifact: Path, policy: str, case: Case) -> dict[str, float]:
    """Return the results of the artifact's own simulations."""
    load, number = case
    path = artifact / "results-jobload" / f"{policy}-{load}" / "summary.json"
    jcts = np.array(list(json.loads(path.read_text())["jcts"][f"workload-{number}"].values()))
    return {"avg_jct_s": float(jcts.mean()), "p99_jct_s": float(np.percentile(jcts, 99))}


def _workload_table(policies: Sequence[str], found: Any, published: Any) -> str:
    cases = [(1.0, number) for number in WORKLOADS]
    title = [f"workload {number}" for number in WORKLOADS] + ["mean"]
    return _compare("average JCT / p99, s", title, cases, policies, found, published)


def _load_table(policies: Sequence[str], found: Any, published: Any) -> str:
    cases = [(load, LOADED) for load in LOADS]
    title = [f"load {load}" for load in LOADS] + ["mean"]
    return _compare("average JCT / p99, s", title, cases, policies, found, published)


def _compare(
    what: str,
    title: Sequence[str],
    cases: Sequence[Case],
    policies: Sequence[str],
    found: Any,
    published: Any,
) -> str:
    """Return a table of all policies, with their ratios to the artifact's Pollux."""
    rows = [(f"artifact: {name}", [published[name, *case] for case in cases]) for name in PUBLISHED]
    rows += [(name, [found.get((name, *case)) for case in cases]) for name in policies]
    base = [published["pollux", *case]["avg_jct_s"] for case in cases]
    lines = head([what, *title])
    for name, values in rows:
        ratios = [
            value["avg_jct_s"] / one for value, one in zip(values, base, strict=True) if value
        ]
        left = iter(ratios)
        cells = [
            f"{value['avg_jct_s']:.0f} ({next(left) - 1:+.0%}) / {value['p99_jct_s']:.0f}"
            if value
            else "–"
            for value in values
        ]
        whole = len(ratios) == len(values)
        cells.append(f"{np.mean(ratios) - 1:+.1%}" if whole else "–")
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines) + "\n"


def _detail_table(policies: Sequence[str], found: Any) -> str:
    """Return further metrics, on average over the workloads at load 1."""
    lines = head(["mean of workloads 1, 2, 3, 6", *(title for _, title, _ in _DETAILS)])
    for name in policies:
        rows = [found[name, 1.0, n] for n in WORKLOADS if (name, 1.0, n) in found]
        if len(rows) < len(WORKLOADS):
            continue
        cells = [form.format(np.mean([row[key] for row in rows])) for key, _, form in _DETAILS]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines) + "\n"


_DETAILS = (
    ("median_jct_s", "median JCT, s", "{:.0f}"),
    ("makespan_s", "makespan, s", "{:.0f}"),
    ("restarts_per_job", "restarts per job", "{:.2f}"),
    ("gpu_utilization", "GPU utilisation", "{:.1%}"),
    ("finish_time_fairness", "fairness rho", "{:.2f}"),
    ("unfair_share", "jobs with rho > 1", "{:.1%}"),
    ("policy_seconds_median", "one decision, s", "{:.4f}"),
)


def head(titles: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]


if __name__ == "__main__":
    main()
