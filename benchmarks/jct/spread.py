"""Differences of averages, p99 and makespans from Pollux's own, over several runs of both.

    python benchmarks/jct/spread.py ARTIFACT --results DIR [--pollux DIR] [--runs 5]
        [--told exact] [--restart-seconds 30] [--rescale-seconds 1] [--rank-power 0.35]

ARTIFACT is the folder `simulator` of petuum/adaptdl, branch osdi21-artifact. A single simulation is
not significant: a job that arrives a second later changes all that follows. So every workload is
simulated several times, first unchanged, then with each arrival up to a second later, as the
scheduler decides (`prices.py --as-scheduler`). Pollux's own are the two runs of the artifact
without slowdowns by neighbours, with and without jobs that avoid sharing nodes, and those of
`pollux_again.py` in the folder --pollux, if given. Prints Markdown: the mean, least and greatest
over runs, and the difference of the means with its standard error. Results are kept in DIR.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import jct
import numpy as np

from pipollux_simulator import Experiment, KnownLength, Options, make_nodes, measure

PUBLISHED = ("results-jobload/pollux-1.0", "results-inter/noavoid")
METRICS = ("avg_jct_s", "p99_jct_s", "makespan_s")
Run = Mapping[str, float]


def main() -> None:
    """Simulate missing results, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--pollux", type=Path)
    parser.add_argument("--workloads", default=",".join(map(str, jct.WORKLOADS)))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--told", default="exact")
    parser.add_argument("--restart-seconds", type=float, default=30.0)
    parser.add_argument("--rescale-seconds", type=float)
    parser.add_argument("--rank-power", type=float)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    numbers = [int(number) for number in options.workloads.split(",")]
    cases = [(number, run) for run in range(options.runs) for number in numbers]
    with get_context("spawn").Pool(options.processes, maxtasksperchild=1) as pool:
        found = dict(zip(cases, pool.map(partial(ours, options), cases, 1), strict=True))
    lines = jct.head(["workload", "of", "runs", *METRICS])
    apart = []
    for number in numbers:
        here = [found[number, run] for run in range(options.runs)]
        theirs = pollux(options.artifact, options.pollux, number)
        lines += [_row(number, "Pollux's own", theirs), _row(number, "ours", here)]
        apart.append({name: _apart(here, theirs, name) for name in METRICS})
        lines.append(f"| {number} | apart | | {' | '.join(map(_shown, apart[-1].values()))} |")
    means = []
    for name in METRICS:
        mean = statistics.fmean(row[name][0] for row in apart)
        error = math.sqrt(sum(row[name][1] ** 2 for row in apart)) / len(apart)
        means.append(_shown((mean, error)))
    lines.append(f"| mean | apart | | {' | '.join(means)} |")
    print("\n".join(lines))


def ours(options: argparse.Namespace, case: tuple[int, int]) -> Run:
    """Return the metrics of one run of a workload, simulated or found."""
    number, run = case
    price = options.rescale_seconds
    names = [options.told, options.restart_seconds, price, options.rank_power, number, run]
    target = options.results / f"{'-'.join(map(str, names))}.json"
    if not target.exists():
        settings = Options(
            restart_seconds=options.restart_seconds,
            rescale_seconds=price,
            known_length=KnownLength.parse(options.told),
            decides_at="changes",
            inherit_models=True,
        )
        workload = jct.workload(options.artifact, (1.0, number))
        if run:
            later = np.random.default_rng([number, run]).random(len(workload.jobs)).tolist()
            late = zip(workload.jobs, later, strict=True)
            jobs = tuple(replace(job, time=job.time + seconds) for job, seconds in late)
            workload = replace(workload, jobs=jobs)
        traces, nodes = options.artifact / "traces", make_nodes({"": (16, 4)})
        power = options.rank_power
        policy = "exact" if power is None else f"exact:rank_power={power}"
        experiment = Experiment(nodes, settings, traces)
        found = measure(experiment.run(workload, policy)).to_dict()
        jct.save(target, {name: found[name] for name in METRICS})
    metrics: Run = json.loads(target.read_text())
    return metrics


def pollux(artifact: Path, again: Path | None, number: int) -> list[Run]:
    """Return the metrics of Pollux's own runs, published and repeated."""
    came = {job.name: job.time for job in jct.workload(artifact, (1.0, number)).jobs}
    found = [json.loads((artifact / folder / "summary.json").read_text()) for folder in PUBLISHED]
    runs = [summary["jcts"][f"workload-{number}"] for summary in found]
    if again is not None:
        paths = sorted(again.glob(f"{number}-*.json"))
        runs += [json.loads(path.read_text())["jcts"] for path in paths]
    return [_metrics(came, run) for run in runs]


def _metrics(came: Mapping[str, float], jcts: Mapping[str, float]) -> Run:
    took = np.array([jcts[name] for name in came])
    end = max(came[name] + jcts[name] for name in came)
    values = took.mean(), np.percentile(took, 99), end - min(came.values())
    return dict(zip(METRICS, map(float, values), strict=True))


def _row(number: int, whose: str, runs: Sequence[Run]) -> str:
    cells = []
    for name in METRICS:
        values = [run[name] for run in runs]
        cells.append(f"{statistics.fmean(values):.0f} ({min(values):.0f} to {max(values):.0f})")
    return f"| {number} | {whose} | {len(runs)} | {' | '.join(cells)} |"


def _apart(here: Sequence[Run], theirs: Sequence[Run], name: str) -> tuple[float, float]:
    """Return the difference of the means and its standard error, both relative to theirs."""
    mine, other = ([run[name] for run in runs] for runs in (here, theirs))
    base = statistics.fmean(other)
    squares = [statistics.variance(x) / len(x) if len(x) > 1 else math.nan for x in (mine, other)]
    return statistics.fmean(mine) / base - 1, math.sqrt(sum(squares)) / base


def _shown(value: tuple[float, float]) -> str:
    apart, error = value
    return f"{apart:+.1%}" + ("" if math.isnan(error) else f" ± {error * 100:.1f}")


if __name__ == "__main__":
    main()
