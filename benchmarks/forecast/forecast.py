"""Calibration and error of forecasts on Pollux's public workloads.

    python benchmarks/forecast/forecast.py ARTIFACT --results DIR [--workloads 1,2,3,6]
        [--told exact,learned] [--every 20] [--passes 4] [--nodes 16] [--policy exact]

ARTIFACT is the folder `simulator` of petuum/adaptdl, branch osdi21-artifact: `traces` and
`workloads`. Each workload is simulated on nodes of 4 GPUs, as the scheduler decides. With every
n-th arrival, all unfinished jobs are forecast from what a scheduler knows then; the simulation goes
on, and says what happened. A scheduler makes forecasts all the time, and learns from those that it
records: there are as many passes between as `--passes` says. Results are kept in DIR, one file per
workload. Prints Markdown.

Under the policy `exact`, nearly every job starts at once, and forecasts of ends are measured; under
`fifo`, jobs hold what they requested, others queue, and forecasts of starts are measured, too.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipollux_policies import JobInfo, family_of, make_policy
from pipollux_sched.forecasting.loop import record_due
from pipollux_simulator import (
    Effort,
    Estimate,
    Experiment,
    ForecastJob,
    ForecastState,
    JobArrival,
    JobForecast,
    KnownLength,
    Options,
    PastError,
    Workload,
    generate,
    make_nodes,
    read_workload,
    requests_for,
)
from pipollux_simulator.forecasting.draws import quantile
from pipollux_simulator.forecasting.errors import ERROR, START_ERROR, running_error, score
from pipollux_simulator.forecasting.forecast import estimate, sample_times, summarize
from pipollux_simulator.forecasting.observed import ObservedCluster
from pipollux_simulator.forecasting.sample import Times
from pipollux_simulator.forecasting.state import ARRIVAL_SECONDS

WORKLOADS = (1, 2, 3, 6)
EARLIER = 101
POLICY = "exact"
NUM_NODES = 16
"""Of the public experiments, and of those that workloads are drawn for."""
DRAWN = 100
"""From this number on, workloads are drawn. The constants of `errors` were chosen on such ones."""
TOLD = {"exact": "known", "learned": "unknown"}
SLACK = 1.0
"""Seconds by which a start or end may miss an interval."""
Row = Mapping[str, Any]
Spreads = tuple[float, float]
"""`ERROR` and `START_ERROR`."""


def main() -> None:
    """Measure what has no result yet, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--workloads", default=",".join(map(str, WORKLOADS)))
    parser.add_argument("--told", default=",".join(TOLD))
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=NUM_NODES)
    parser.add_argument("--policy", default=POLICY)
    parser.add_argument("--error", type=float, default=ERROR)
    parser.add_argument("--start-error", type=float, default=START_ERROR)
    parser.add_argument("--found", action="store_true")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    numbers = [int(number) for number in options.workloads.split(",")]
    tolds = options.told.split(",")
    cases = [(told, number) for number in numbers for told in tolds]
    if options.found:
        cases = [case for case in cases if _file(options, *case).exists()]
    found = {case: measured(options, *case) for case in cases}
    spreads = options.error, options.start_error
    print(table(found, tolds, {}, spreads))
    if all(_file(options, told, EARLIER).exists() for told in tolds):
        earlier = {told: measured(options, told, EARLIER) for told in tolds}
        before = {told: _all_errors(rows, spreads) for told, rows in earlier.items()}
        print(f"\nWith the past errors of workload {EARLIER} from the start:\n")
        print(table(found, tolds, before, spreads))
    print(cost(found))


def _all_errors(rows: Sequence[Row], spreads: Spreads) -> list[PastError]:
    last = {**rows[0], "now": math.inf}
    return [*errors_before(last, rows, spreads)]


def measured(options: argparse.Namespace, told: str, number: int) -> list[Row]:
    """Return the forecasts of one workload beside what happened, simulated or found."""
    target = _file(options, told, number)
    if not target.exists():
        rows = simulate(options, told, number)
        beside = target.with_suffix(".part")
        beside.write_text(json.dumps(rows))
        beside.replace(target)
    rows = json.loads(target.read_text())
    return [{**row, "told": told, "workload": number} for row in rows]


def _file(options: argparse.Namespace, told: str, number: int) -> Path:
    nodes = "" if options.nodes == NUM_NODES else f"-nodes-{options.nodes}"
    policy = "" if options.policy == POLICY else f"-{options.policy}"
    return Path(options.results) / f"{told}-{number}-every-{options.every}{nodes}{policy}.json"


def simulate(options: argparse.Namespace, told: str, number: int) -> list[dict[str, Any]]:
    """Simulate a workload, with forecasts at every n-th arrival."""
    artifact, every = options.artifact, options.every
    jobs = workload(artifact, number)
    nodes = make_nodes({"": (options.nodes, 4)})
    settings = Options(
        known_length=KnownLength.parse(told), decides_at="changes", inherit_models=True
    )
    experiment = Experiment(nodes, settings, artifact / "traces")
    applications = experiment.applications(Workload(f"workload-{number}", jobs))
    rows: list[dict[str, Any]] = []
    times = [job.time for job in jobs]
    scored = Moments(times[every // 2 :: every])
    passes = Moments(times[:: max(every // options.passes, 1)])
    recorded: dict[str, float] = {}

    def observe(cluster: ObservedCluster) -> None:
        is_scored, is_pass = scored.is_due(cluster.now), passes.is_due(cluster.now)
        if is_scored or is_pass:
            starts = [job.started for job in cluster.known_jobs() if job.started is not None]
            state = replace(cluster.state(), errors=tuple(running_errors(rows, cluster)))
            made = forecasts(state, options.policy, starts)
            recorded.update(mark(made, state, recorded, is_scored=is_scored))
            rows.extend(row for row in made if row["is_scored"] or row["is_recorded"])

    policy = make_policy(options.policy)
    cluster = ObservedCluster(jobs, applications, nodes, policy, settings, observe=observe)
    done = {job.name: job for job in cluster.run().jobs}
    for row in rows:
        row["started"], row["completed"] = done[row["job"]].started, done[row["job"]].completed
        row["arrived"] = done[row["job"]].arrival.time
    return rows


def mark(
    made: Sequence[dict[str, Any]],
    state: ForecastState,
    recorded: Mapping[str, float],
    *,
    is_scored: bool,
) -> dict[str, float]:
    """Note whether forecasts are scored and recorded; return when those recorded were made."""
    for row, job in zip(made, state.jobs, strict=True):
        row["is_scored"] = is_scored
        row["is_recorded"] = record_due(state.now, recorded.get(job.name), job.info.created)
    return {row["job"]: state.now for row in made if row["is_recorded"]}


def running_errors(rows: Sequence[Row], cluster: ObservedCluster) -> Iterator[PastError]:
    """Yield the errors of running times that are known by now; the samples depend on them."""
    jobs = {job.name: job for job in cluster.known_jobs()}
    for row in filter(_is_recorded, rows):
        job = jobs[row["job"]]
        if job.started is not None and job.completed is not None:
            error = running_error(row["running_seconds"], job.completed - job.started)
            yield PastError(family_of(job.name), None, running=error)


def _is_recorded(row: Row) -> bool:
    return bool(row["is_recorded"])


def workload(artifact: Path, number: int) -> tuple[JobArrival, ...]:
    """Return a public workload; from `DRAWN` on, one that is drawn like them."""
    if number >= DRAWN:
        requests = requests_for("pollux", make_nodes({"": (NUM_NODES, 4)}), artifact / "traces")
        return generate(160, 8.0, number, "pollux", requests)
    return read_workload(artifact / "workloads" / f"workload-{number}.csv")


class Moments:
    """Moments at which forecasts are due, at the first decision at or after each."""

    def __init__(self, moments: Sequence[float]) -> None:
        self._moments = list(moments)

    def is_due(self, now: float) -> bool:
        """Return whether a moment has come since the last call."""
        due = bool(self._moments) and self._moments[0] <= now
        while self._moments and self._moments[0] <= now:
            self._moments.pop(0)
        return due


def forecasts(state: ForecastState, policy: str, starts: Sequence[float]) -> list[dict[str, Any]]:
    """Return the raw forecasts of all jobs of a state; `starts`: of jobs up to now."""
    began = time.process_time()
    samples = sample_times(state, lambda: make_policy(policy), seed=0, effort=Effort())
    seconds = time.process_time() - began
    queue = [job.name for job in state.jobs if job.is_new]
    return [
        {
            "job": job.name,
            "now": state.now,
            "times": [sample[job.name] for sample in samples],
            "is_new": job.is_new,
            "running_seconds": summarize(
                job, [sample[job.name] for sample in samples], state
            ).running_seconds,
            "naive": naive(job, state),
            "naive_start": naive_start(queue.index(job.name), starts, state.now)
            if job.is_new
            else None,
            "cpu_seconds": seconds,
            "num_jobs": len(state.jobs),
        }
        for job in state.jobs
    ]


def naive(job: ForecastJob, state: ForecastState) -> float:
    """Return when a job ends if its speed stays; of unknown lengths, the median is taken.

    Infinite: it does not train now, or nothing is known.
    """
    if not job.allocation or not job.info.likely_work:
        return math.inf
    work = quantile(job.info.likely_work, 0.5)
    return state.now + job.starts_in + work / max(job.allocation.speedup, 1e-9)


def naive_start(place: int, starts: Sequence[float], now: float) -> float:
    """Return when a job starts if jobs go on to start at the rate of the last hour.

    `place`: number of jobs before it in the queue. Infinite: none has started in that time.
    """
    since = max(now - ARRIVAL_SECONDS, 0.0)
    rate = sum(moment > since for moment in starts) / (now - since)
    return now + (place + 1) / rate if rate else math.inf


def table(
    found: Mapping[tuple[str, int], Sequence[Row]],
    tolds: Sequence[str],
    before: Mapping[str, Sequence[PastError]],
    spreads: Spreads,
) -> str:
    """Return coverage and errors, per workload and over all."""
    head = (
        *("job lengths", "workload", "forecasts", "ends covered", "width", "median error"),
        *("uncorrected", "training jobs", "their median error", "naive"),
        *("starts", "covered", "width", "median error", "naive"),
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for told in tolds:
        parts = {str(case[1]): rows for case, rows in found.items() if case[0] == told}
        parts["all"] = [row for rows in parts.values() for row in rows]
        past = before.get(told, ())
        for name, rows in parts.items():
            lines.append(
                f"| {TOLD.get(told, told)} | {name} | {' | '.join(_cells(rows, past, spreads))} |"
            )
    return "\n".join(lines)


def _cells(rows: Sequence[Row], past: Sequence[PastError], spreads: Spreads) -> list[str]:
    ends, widths, errors, plain, ours, naives = [], [], [], [], [], []
    begun: list[tuple[bool, float, float, float]] = []
    for row in filter(_is_scored, rows):
        beside = [one for one in rows if _same_moment(one, row)]
        known = [*past, *errors_before(row, rows, spreads)]
        found = forecast_of(row, beside, known, spreads)
        now, completed = row["now"], row["completed"]
        ends.append(_covers(found.end, completed))
        widths.append(_width(found.end, now, completed))
        errors.append(_error(found.end.median, now, completed))
        plain.append(_error(found.uncorrected_end.median, now, completed))
        if math.isfinite(row["naive"]):
            ours.append(errors[-1])
            naives.append(_error(row["naive"], now, completed))
        if found.start is not None:
            started = row["started"]
            begun.append(
                (
                    _covers(found.start, started),
                    _width(found.start, now, started),
                    _error(found.start.median, now, started),
                    _error(row["naive_start"], now, started),
                )
            )
    covered, *figures = zip(*begun, strict=True) if begun else ((), (), (), ())
    return [
        *(str(len(ends)), _percent(ends), _median(widths), _median(errors), _median(plain)),
        *(str(len(ours)), _median(ours), _median(naives)),
        *(str(len(begun)), _percent(covered), *map(_median, figures)),
    ]


def _covers(found: Estimate, actual: float) -> bool:
    return found.low - SLACK <= actual <= found.high + SLACK


def _width(found: Estimate, now: float, actual: float) -> float:
    return (found.high - found.low) / (actual - now)


def _error(median: float, now: float, actual: float) -> float:
    return abs(median - actual) / (actual - now)


def _is_scored(row: Row) -> bool:
    return bool(row["is_scored"])


def _same_moment(one: Row, other: Row) -> bool:
    return all(one[key] == other[key] for key in ("told", "workload", "now"))


def forecast_of(
    row: Row, beside: Sequence[Row], past: Sequence[PastError], spreads: Spreads
) -> JobForecast:
    """Return the forecast of a job, one of all `beside`, as corrected by past errors."""
    job, jobs = _job_of(row), tuple(map(_job_of, beside))
    state = ForecastState(row["now"], {}, jobs, errors=tuple(past))
    return summarize(job, [Times(*both) for both in row["times"]], state, *spreads)


def _job_of(row: Row) -> ForecastJob:
    info = JobInfo({"slots": 1}, lambda nodes, replicas: replicas, row["arrived"], 1, 1)  # noqa: ARG005  # not used
    return ForecastJob(row["job"], info, is_new=row["is_new"], family=family_of(row["job"]))


def errors_before(row: Row, rows: Sequence[Row], spreads: Spreads) -> Iterator[PastError]:
    """Yield the errors of the forecasts whose jobs had completed when a forecast was made."""
    for one in filter(_is_recorded, rows):
        if (one["told"], one["workload"]) != (row["told"], row["workload"]):
            continue
        if one["completed"] <= row["now"]:
            moments = (one["completed"], one["started"])
            raw = [estimate([times[i] for times in one["times"]]) for i in (1, 0)]
            end, start = map(score, raw, [one["now"]] * 2, moments, spreads)
            yield PastError(family_of(one["job"]), end, start if one["is_new"] else None)


def _percent(values: Sequence[bool]) -> str:
    return f"{sum(values) / len(values):.0%}" if values else "–"


def _median(values: Sequence[float]) -> str:
    return f"{np.median(values):.0%}" if values else "–"


def cost(found: Mapping[Any, Sequence[Row]]) -> str:
    """Return the CPU time of a forecast of all jobs."""
    seconds = {(key, row["now"]): row["cpu_seconds"] for key, rows in found.items() for row in rows}
    jobs = {(key, row["now"]): row["num_jobs"] for key, rows in found.items() for row in rows}
    values, counts = [*seconds.values()], [*jobs.values()]
    return (
        f"\nOne forecast of all jobs took {np.median(values):.1f} s of CPU time (median; at most "
        f"{max(values):.1f} s) for {np.median(counts):.0f} jobs (median; at most {max(counts)})."
    )


if __name__ == "__main__":
    main()
