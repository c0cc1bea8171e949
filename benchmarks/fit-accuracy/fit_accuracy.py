"""Accuracy of fitted models on the step times of Pollux's traces, beside AdaptDL's own fit.

    python benchmarks/fit-accuracy/fit_accuracy.py TRACES

TRACES is the folder `traces` of the public artifact of Pollux (petuum/adaptdl, branch
osdi21-artifact): per application `placements.csv`, step times on up to 4 nodes of 4 GPUs, and
`scalability.csv`, on up to 16 nodes. Prints a Markdown table of the mean of |predicted / measured -
1| over step times.
"""

from __future__ import annotations

import argparse
import csv
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import adaptdl.goodput
import numpy as np

from pipollux_perfmodel import GoodputFunction, PerfParams, fit_perf_params

Floats = np.ndarray


class Trace(NamedTuple):
    """Measurements of an application; arrays of shape (points,)."""

    num_nodes: Floats
    num_replicas: Floats
    local_bsz: Floats
    step_time: Floats
    accum_time: Floats
    """Step time minus the time in synchronization."""
    at_scale: Floats
    """Whether it is from scalability.csv."""

    def where(self, chosen: Floats) -> Trace:
        """Return the chosen measurements."""
        return Trace(*(column[chosen] for column in self))


SPLITS: dict[str, tuple[Callable[[Trace], Floats], Callable[[Trace], Floats]]] = {
    "in-sample, up to 16 GPUs": (
        lambda t: t.at_scale == 0,
        lambda t: t.at_scale == 0,
    ),
    "in-sample, up to 64 GPUs": (
        lambda t: t.num_replicas > 0,
        lambda t: t.num_replicas > 0,
    ),
    "fitted on 1 to 4, predicting 5 to 16": (
        lambda t: (t.num_replicas <= 4) & (t.at_scale == 0),
        lambda t: (t.num_replicas > 4) & (t.at_scale == 0),
    ),
    "fitted on 1 to 4, predicting 5 to 64": (
        lambda t: t.num_replicas <= 4,
        lambda t: t.num_replicas > 4,
    ),
    "fitted on 1 to 16, predicting 17 to 64": (
        lambda t: t.num_replicas <= 16,
        lambda t: t.num_replicas > 16,
    ),
}


def main() -> None:
    """Fit and predict every application under every split."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, help="folder with one folder per application")
    folder = parser.parse_args().traces
    applications = sorted(path.parent.name for path in folder.glob("*/placements.csv"))
    if not applications:
        sys.exit(f"{folder} has no */placements.csv; give the folder `traces` of the artifact")
    traces = [read(folder / application) for application in applications]
    print("| AdaptDL / Pipollux | " + " | ".join([*applications, "mean"]) + " |")
    print("|---" * (len(applications) + 2) + "|")
    for split, (fitted, predicted) in SPLITS.items():
        errors = [
            errors_of(trace.where(fitted(trace)), trace.where(predicted(trace))) for trace in traces
        ]
        cells = [
            f"{theirs:.1%} / {ours:.1%}" for theirs, ours in [*errors, np.mean(errors, axis=0)]
        ]
        print(f"| {split} | " + " | ".join(cells) + " |", flush=True)


def errors_of(fitted: Trace, predicted: Trace) -> tuple[float, float]:
    """Return the mean relative errors of AdaptDL's fit and of ours."""
    arguments = fitted.num_nodes, fitted.num_replicas, fitted.local_bsz
    times = fitted.accum_time, fitted.step_time
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        theirs = adaptdl.goodput.fit_perf_params(*arguments, *times)
    both = PerfParams(*theirs), fit_perf_params(*arguments, *times)
    first, second = (error(params, predicted) for params in both)
    return first, second


def error(params: PerfParams, trace: Trace) -> float:
    """Return the mean of |predicted / measured - 1| of step times."""
    # AdaptDL's seven numbers give AdaptDL's predictions; tests compare to 1e-9.
    model = GoodputFunction(params, (1.0, 1.0), 1)
    times = model.step_time(trace.num_nodes, trace.num_replicas, trace.local_bsz, 0)
    return float(np.mean(np.abs(times.optim_time / trace.step_time - 1)))


def read(folder: Path) -> Trace:
    rows = [*placements(folder / "placements.csv"), *scalability(folder / "scalability.csv")]
    nodes, replicas, size, step, sync, at_scale = np.array(rows).T
    return Trace(nodes, replicas, size, step, step - sync, at_scale)


def placements(path: Path) -> Iterator[tuple[float, ...]]:
    """Yield the rows of placements.csv; a placement has a digit per node, its replicas."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            counts = [int(digit) for digit in row["placement"]]
            yield (len(counts), sum(counts), *measured(row), 0)


def scalability(path: Path) -> Iterator[tuple[float, ...]]:
    """Yield the rows of scalability.csv."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            yield (float(row["num_nodes"]), float(row["num_replicas"]), *measured(row), 1)


def measured(row: dict[str, str]) -> tuple[float, float, float]:
    return float(row["local_bsz"]), float(row["step_time"]), float(row["sync_time"])


if __name__ == "__main__":
    main()
