"""Step times on a GPU: measured by a job itself, predicted, and by a clock.

    .venv/bin/python benchmarks/gpu/step_times.py [--stages 2]

A job trains with all combinations of some batch sizes and numbers of micro-batches, in turn and
repeatedly, with all stages on one GPU. The clock is read around blocks of steps, before and after
which the GPU is idle. As in benchmarks/engines the performance model is fitted to the corners only:
the smallest and the largest batch, with the fewest and the most micro-batches.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import defaultdict

import torch
from model import SIZES, data, layers, loss_of
from torch.utils.data import TensorDataset

import pipollux
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_hybrid.telemetry.step_profile import StepProfile
from pipollux_perfmodel.timing.step_time import step_time

MICROBATCHES = (1, 2, 4, 8)
Key = tuple[int, int]
"""Batch size and number of micro-batches."""


def measure(options: argparse.Namespace) -> dict[Key, float]:
    """Train with every configuration; return the seconds of a step by the clock."""
    size, cuda = SIZES[options.size], options.device != "cpu"
    module = layers(size)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    texts = data(size, options.count)
    model = pipollux.HybridParallel(
        module,
        optimizer,
        num_stages=options.stages,
        num_microbatches=1,
        devices=[options.device] * options.stages,
        activation_checkpoint=options.checkpoint,
    )
    sizes = [size.batch * part // 4 for part in (1, 2, 3, 4)]
    loaders = {
        b: pipollux.AdaptiveDataLoader(
            TensorDataset(*(x[: b * options.count] for x in texts.tensors)), batch_size=b
        )
        for b in sizes
    }
    found: dict[Key, list[float]] = defaultdict(list)
    turns = list(itertools.product(sizes, MICROBATCHES))
    for number in range(options.rounds):
        for b, num_microbatches in turns[:: 1 if number % 2 else -1]:
            model.num_microbatches = num_microbatches
            if cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            for codes, targets in loaders[b]:
                optimizer.zero_grad()
                loss = model.train_step(codes, targets, loss_of)
                optimizer.step()
                if options.report:
                    pipollux.report(loss=loss)
            if cuda:
                torch.cuda.synchronize()
            seconds = (time.perf_counter() - began) / options.count
            if number:  # the first round warms up
                found[b, num_microbatches].append(seconds)
    return {key: statistics.median(values) for key, values in found.items()}


def show(options: argparse.Namespace, clock: dict[Key, float]) -> None:
    metrics = context().component(Metrics)
    rows = metrics.profile.to_json()
    summaries = metrics.profile.summaries().items()
    by_key = {(x.atomic_bsz, x.num_microbatches): summary for x, summary in summaries}
    sizes, counts = sorted({b for b, _ in clock}), MICROBATCHES
    corners = set(itertools.product((sizes[0], sizes[-1]), (counts[0], counts[-1])))
    metrics.profile = StepProfile()
    metrics.profile.load_json(
        [row for row in rows if (row["atomic_bsz"], row["num_microbatches"]) in corners]
    )
    metrics.fit()
    params = metrics.perf_params
    if params is None:
        raise SystemExit("the corners were not measured: give more rounds")
    print(f"\n{options.size}, K = {options.stages}, {options.checkpoint}: {params}\n")
    print(
        "| batch | M | by the clock, ms | measured by the job | stages' times | predicted | error |"
    )
    print("|---|---|---|---|---|---|---|")
    errors, gaps = [], []
    for key, seconds in sorted(clock.items()):
        row = by_key[key]
        measured = row.optim
        stages = [*row.forward, *row.backward]
        predicted = float(step_time(params, 1, 1, key[0], 0, key[1]).total)
        error = predicted / seconds - 1
        gaps.append(abs(measured / seconds - 1))
        if key not in corners:
            errors.append(abs(error))
        cells = [
            *(str(x) for x in key),
            f"{1e3 * seconds:.1f}",
            f"{1e3 * measured:.1f}",
            f"{1e3 * key[1] * sum(stages):.1f}",
            f"{1e3 * predicted:.1f}",
            f"{error:+.1%}{' (fitted)' if key in corners else ''}",
        ]
        print(f"| {' | '.join(cells)} |")
    print(
        f"\nmeasured by the job, against the clock: {statistics.fmean(gaps):.1%} off on average, "
        f"at most {max(gaps):.1%}; predicted and not fitted: {statistics.fmean(errors):.1%}, at "
        f"most {max(errors):.1%}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--checkpoint", default="except_last")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=12, help="steps of a configuration in a round")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--report", action="store_true", help="report the loss of each step")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    pipollux.init_process_group()
    show(options, measure(options))


if __name__ == "__main__":
    main()
