"""Predicted against measured step times of configurations that were not fitted.

    .venv/bin/torchrun --standalone --nproc-per-node 2 benchmarks/engines/predictions.py

Two processes of one thread each, and two stages. A job trains with all combinations of some batch
sizes and numbers of micro-batches, in turn and repeatedly; its profile has the medians. The
performance model is fitted as in a job, but only to the corners: the smallest and the largest
batch, with the fewest and the most micro-batches. It then predicts all others.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics

import torch
import torch.nn.functional as F
from engines import CHUNKS, MODELS, make
from torch.utils.data import TensorDataset

import pipollux
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_hybrid.telemetry.step_profile import StepProfile
from pipollux_perfmodel import PerfParams
from pipollux_perfmodel.timing.step_time import step_time

BATCHES = {"mlp": (128, 256, 384, 512), "transformer": (8, 16, 24, 32)}
MICROBATCHES = (2, 3, 4, 8)
Times = dict[tuple[int, int], float]
"""Seconds of a step by batch size and number of micro-batches."""


def measure(name: str, schedule: str, rounds: int, count: int) -> StepProfile:
    """Train with every configuration; return the job's measurements."""
    module, optimizer, data = make(name)
    chunked = schedule == "interleaved"
    model = pipollux.HybridParallel(
        module,
        optimizer,
        balance=(CHUNKS if chunked else {k: v[1] for k, v in MODELS.items()})[name],
        num_microbatches=MICROBATCHES[0],
        activation_checkpoint="never",
        schedule=schedule,
    )
    loaders = {}
    for size in BATCHES[name]:
        rows = (torch.arange(size * count) % len(data)).long()
        loaders[size] = pipollux.AdaptiveDataLoader(
            TensorDataset(*(x[rows] for x in data.tensors)), batch_size=size
        )
    turns = list(itertools.product(BATCHES[name], MICROBATCHES))
    for round_ in range(rounds):
        for size, num_microbatches in turns[:: 1 if round_ % 2 else -1]:
            model.num_microbatches = num_microbatches
            for inputs, targets in loaders[size]:
                optimizer.zero_grad()
                model.train_step(inputs, targets, F.cross_entropy)
                optimizer.step()
    return context().component(Metrics).profile


def medians(profile: StepProfile) -> Times:
    data = profile.fit_data(2, "never", 2, context().pipeline.order)
    if data is None:
        raise SystemExit("no step was measured: give more rounds")
    keys = zip(data.atomic_bsz, data.num_microbatches, strict=True)
    return dict(zip(keys, data.optim_step_time, strict=True))


def fit(profile: StepProfile, corners: set[tuple[int, int]]) -> PerfParams:
    """Fit as in a job, to the corners only."""
    metrics = context().component(Metrics)
    rows = [
        row for row in profile.to_json() if (row["atomic_bsz"], row["num_microbatches"]) in corners
    ]
    metrics.profile = StepProfile()
    metrics.profile.load_json(rows)
    metrics.fit()
    if metrics.perf_params is None:
        raise SystemExit("the corners were not measured: give more rounds")
    return metrics.perf_params


def show(name: str, schedule: str, profile: StepProfile) -> None:
    measured = medians(profile)
    sizes, counts = BATCHES[name], MICROBATCHES
    corners = set(itertools.product((sizes[0], sizes[-1]), (counts[0], counts[-1])))
    params = fit(profile, corners)
    errors = []
    print(f"\n{name}, {schedule}: overlap {params.overlap:.2f}\n")
    print("| batch | M | measured, ms | predicted | error |")
    print("|---|---|---|---|---|")
    for (size, count), seconds in sorted(measured.items()):
        predicted = float(step_time(params, 1, 1, size, 0, count).total)
        error, fitted = predicted / seconds - 1, (size, count) in corners
        if not fitted:
            errors.append(abs(error))
        mark = " (fitted)" if fitted else ""
        row = size, count, f"{1e3 * seconds:.0f}", f"{1e3 * predicted:.0f}", f"{error:+.1%}{mark}"
        print("|", " | ".join(map(str, row)), "|")
    print(
        f"\nmean error of the {len(errors)} not fitted {statistics.fmean(errors):.1%}, "
        f"largest {max(errors, default=math.nan):.1%}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=7, help="steps of a configuration in a round")
    parser.add_argument("--model", default="transformer", choices=list(BATCHES))
    parser.add_argument("--schedule", default="1f1b", choices=("1f1b", "interleaved", "gpipe"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    pipollux.init_process_group("gloo", processes_per_replica=2)
    profile = measure(options.model, options.schedule, options.rounds, options.count)
    if torch.distributed.get_rank() == 0:
        show(options.model, options.schedule, profile)


if __name__ == "__main__":
    main()
