"""The goodput of the batch sizes that a job chooses on a GPU, by a clock that waits for the GPU.

    .venv/bin/python benchmarks/gpu/sizes.py [--size medium]

A job with one replica trains, fits its performance model every second and changes its batch size to
improve goodput: as the library does, by measurements of each size and by trials; and by its model
alone, from 5 % more goodput on, as AdaptDL does. Then steps of a grid of sizes, and of the chosen
ones, are timed, which gives the goodput of the choices. The gradient's noise is given, so that the
best size is neither the smallest nor the largest. There are two micro-batches: with one, a single
replica would keep its initial size, as its noise is not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import statistics
import time
from typing import Any
from unittest import mock

import numpy as np
import torch
from model import SIZES, Size, data, layers, loss_of
from torch.utils.data import TensorDataset

import pipollux
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from pipollux_hybrid.optim.gradient_noise_scale import (
    GradientNoiseScale,
    MeasuredNoise,
    RunningAverage,
)
from pipollux_hybrid.telemetry import autotuner
from pipollux_hybrid.telemetry.metrics import Metrics

WARM_UP, TIMED = 30, 30
GRID = 12
ARMS = ("by measurements", "by the model alone")


class Given(GradientNoiseScale):
    """A given noise scale in samples."""

    def __init__(self, init_batch_size: int, samples: float) -> None:
        super().__init__(init_batch_size)
        self.num_samples = 1
        self._sqr = RunningAverage(1.0, 1.0)
        self._var = RunningAverage(samples / init_batch_size, 1.0)

    def update(self, **_: Any) -> None:
        """Leave it unchanged."""


def job(size: Size, batch: int, options: argparse.Namespace, *, scales: bool) -> Any:
    """Create a job; return its loader and a function that trains a batch."""
    contexts.reset()
    gc.collect()
    pipollux.init_process_group()
    module, texts = layers(size), data(size, 64)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    long = TensorDataset(*(x.repeat(options.largest, 1) for x in texts.tensors))
    loader = pipollux.AdaptiveDataLoader(long, batch, pin_memory=options.device != "cpu")
    bounds = (size.batch // 2, size.batch * options.largest)
    if scales:
        loader.autoscale_batch_size(bounds[1], local_bsz_bounds=bounds)
    model = pipollux.HybridParallel(
        module, optimizer, num_stages=1, num_microbatches=2, devices=[options.device]
    )
    context().component(MeasuredNoise).scale = Given(size.batch, options.noise * size.batch)

    def step(codes: torch.Tensor, targets: torch.Tensor) -> None:
        optimizer.zero_grad()
        model.train_step(codes, targets, loss_of)
        optimizer.step()

    return loader, step


def wait(options: argparse.Namespace) -> float:
    """Return the time when the device is idle."""
    if options.device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def choose(size: Size, arm: str, options: argparse.Namespace) -> list[int]:
    """Return the batch size of every second of a job's training."""
    without = [
        mock.patch.object(autotuner.Autotuner, "_size_corrections", return_value=None),
        mock.patch.object(autotuner, "RETUNE_GAIN", 1.05),
    ]
    with contextlib.ExitStack() as patches:
        for patch in without if arm == ARMS[1] else ():
            patches.enter_context(patch)
        loader, step = job(size, size.batch, options, scales=True)
        metrics, chosen = context().component(Metrics), list[int]()
        due = wait(options) + 1.0
        for _ in pipollux.remaining_epochs_until(10**6):
            for codes, targets in loader:
                step(codes, targets)
                if time.perf_counter() > due:
                    chosen.append(len(codes))
                    metrics.fit()
                    due = time.perf_counter() + 1.0
                if len(chosen) == options.seconds:
                    return chosen
    raise AssertionError("a job has epochs without end")


def step_seconds(size: Size, batch: int, options: argparse.Namespace) -> float:
    """Return the seconds of a step, the mean of `TIMED` after `WARM_UP`."""
    loader, step = job(size, batch, options, scales=False)
    began = done = 0
    for _ in pipollux.remaining_epochs_until(10**6):
        for codes, targets in loader:
            if done == WARM_UP:
                began = wait(options)
            step(codes, targets)
            done += 1
            if done == WARM_UP + TIMED:
                return (wait(options) - began) / TIMED
    raise AssertionError("a job has epochs without end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seconds", type=int, default=30, help="of training in each arm")
    parser.add_argument("--noise", type=float, default=4.0, help="in initial batch sizes")
    parser.add_argument("--largest", type=int, default=32, help="batch, in initial batch sizes")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    size = SIZES[options.size]
    chosen = {arm: choose(size, arm, options) for arm in ARMS}
    ends = size.batch // 2, size.batch * options.largest
    grid = {round(ends[0] * (ends[1] / ends[0]) ** (i / (GRID - 1))) for i in range(GRID)}
    sizes = sorted(grid.union(*(values[-1:] for values in chosen.values())))
    seconds = {batch: step_seconds(size, batch, options) for batch in sizes}
    noise = options.noise * size.batch
    print(f"\n{options.size}, M = 2, a noise scale of {noise:.0f} samples\n")
    print("| batch | a step, ms | samples/s | goodput |")
    print("|---|---|---|---|")
    gain = {
        b: b * (noise + size.batch) / (noise + b)
        for b in {*sizes, *itertools.chain(*chosen.values())}
    }
    # Linear between timed sizes.
    times = dict(zip(gain, np.interp([*gain], sizes, [*seconds.values()]), strict=True))
    goodput = {b: gain[b] / times[b] for b in gain}
    for b, t in seconds.items():
        print(f"| {b} | {1e3 * t:.1f} | {b / t:.0f} | {goodput[b]:.0f} |")
    best = max(sizes, key=lambda b: goodput[b])
    for arm, values in chosen.items():
        changes = sum(a != b for a, b in itertools.pairwise(values))
        shares = [goodput[b] / goodput[best] - 1 for b in values]
        later = statistics.fmean(shares[len(shares) // 2 :])
        print(
            f"\n{arm}: {values}; {changes} changes; against the goodput of the best, {best}: "
            f"{statistics.fmean(shares):+.1%} on average, {later:+.1%} in the later half, "
            f"{shares[-1]:+.1%} at the end",
            flush=True,
        )


if __name__ == "__main__":
    main()
