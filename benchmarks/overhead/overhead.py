"""The time of a training step in HybridParallel over the same step in bare torchgpipe.

One process, one pipeline replica, the character transformer of `examples/char_lm.py` as two stages
on the CPU. Both train on the same batches with the same balance, micro-batches and checkpoint mode;
epochs run in turn, so that other load affects both alike.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/overhead/overhead.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset, default_collate
from torchgpipe import GPipe

import pipollux

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from char_lm import VOCABULARY, Block, Embedding, Windows, standard_library

BATCH, LENGTH, WIDTH, STEPS = 32, 64, 128, 8
BALANCE, MICROBATCHES = [3, 4], 4
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(WIDTH, heads=4) for _ in range(4)]
    head = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)]
    return nn.Sequential(Embedding(LENGTH, WIDTH), *blocks, *head)


def bare(name: str, batches: list[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """An epoch in torchgpipe alone."""
    module = layers()
    optimizer = OPTIMIZERS[name](module.parameters())
    model = GPipe(module, BALANCE, devices=["cpu", "cpu"], chunks=MICROBATCHES)

    def epoch() -> None:
        for codes, targets in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(codes).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()

    return epoch


def wrapped(name: str, data: Subset[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """An epoch in HybridParallel, its loader included."""
    module = layers()
    optimizer = OPTIMIZERS[name](module.parameters())
    loader = pipollux.AdaptiveDataLoader(data, batch_size=BATCH)
    model = pipollux.HybridParallel(
        module, optimizer, balance=BALANCE, num_microbatches=MICROBATCHES
    )

    def epoch() -> None:
        for codes, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(codes).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()

    return epoch


def seconds(epoch: Callable[[], None]) -> float:
    started = time.perf_counter()
    epoch()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead of HybridParallel over torchgpipe.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="AdamW")
    args = parser.parse_args()
    pipollux.init_process_group()
    windows = Windows(standard_library(BATCH * STEPS * LENGTH + 1), LENGTH)
    data = Subset(windows, range(BATCH * STEPS))
    batches = [
        default_collate([data[i] for i in range(first, first + BATCH)])
        for first in range(0, len(data), BATCH)
    ]
    one, other = bare(args.optimizer, batches), wrapped(args.optimizer, data)
    for _ in range(8):  # after the iterations that measure the noise at every step
        one(), other()
    pairs = [(seconds(one), seconds(other)) for _ in range(args.epochs)]
    ratios = sorted(b / a for a, b in pairs)
    milliseconds = [1e3 * statistics.median(times) / STEPS for times in zip(*pairs, strict=True)]
    print(
        f"{args.optimizer}: torchgpipe {milliseconds[0]:.1f} ms a step, HybridParallel "
        f"{milliseconds[1]:.1f} ms; ratio {statistics.median(ratios):.3f} "
        f"(quartiles {ratios[len(ratios) // 4]:.3f} to {ratios[3 * len(ratios) // 4]:.3f})"
    )


if __name__ == "__main__":
    main()
