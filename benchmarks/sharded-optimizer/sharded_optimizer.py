"""Cost of ``shard_optimizer=True`` in time, and its saving of memory.

    torchrun --nproc-per-node=2 benchmarks/sharded-optimizer/sharded_optimizer.py

Both variants take turns in the same processes, a few steps each, so that other load affects both.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pipollux
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.optim import noise_meter

WARM_UP, TIMED = 6, 16
"""Steps per turn."""


class Turn(NamedTuple):
    """Medians of one turn, and the bytes of the optimizer's state."""

    step: float
    optimizer: float
    fastest: float
    state: int


def take_turn(args: argparse.Namespace, *, sharded: bool) -> Turn:
    """Train a new model for some steps."""
    contexts.reset()
    torch.manual_seed(0)
    layers = [(nn.Linear(args.width, args.width), nn.ReLU()) for _ in range(args.depth)]
    module = nn.Sequential(*(layer for pair in layers for layer in pair))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4)
    batch = args.samples * pipollux.num_replicas()
    data = TensorDataset(torch.arange((WARM_UP + TIMED + 1) * batch))
    loader = pipollux.AdaptiveDataLoader(data, batch_size=batch)
    model = pipollux.HybridParallel(module, optimizer, shard_optimizer=sharded)
    content = torch.randn(256, args.width)
    begun, took = [], []
    for _ in pipollux.remaining_epochs_until(1):
        for (numbers,) in loader:
            begun.append(time.perf_counter())
            inputs = content[numbers % 256]
            optimizer.zero_grad()
            F.mse_loss(model(inputs), inputs.flip(1)).backward()
            before = time.perf_counter()
            optimizer.step()
            took.append(time.perf_counter() - before)
    steps = [after - before for before, after in itertools.pairwise(begun[WARM_UP:])]
    tensors = [x for held in optimizer.state.values() for x in held.values()]
    state = sum(x.nbytes for x in tensors if isinstance(x, Tensor) and x.dim())
    median = statistics.median
    return Turn(median(steps), median(took[WARM_UP:]), min(steps), state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--samples", type=int, default=32, help="of a replica in a step")
    parser.add_argument("--turns", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pipollux.init_process_group("gloo")
    noise_meter.MEASURED_AT_FIRST = 2  # a short turn has steps like most of a long run
    turns = [[take_turn(args, sharded=x) for x in (False, True)] for _ in range(args.turns)]
    if pipollux.replica_rank() == 0:
        megabytes = args.depth * (args.width + 1) * args.width * 4e-6
        print(f"{megabytes:.1f} MB of parameters, {args.samples} samples a replica")
        for name in Turn._fields[:3]:
            pairs = [(getattr(a, name) * 1e3, getattr(b, name) * 1e3) for a, b in turns]
            without, sharded = (statistics.median(x) for x in zip(*pairs, strict=True))
            ratio = statistics.median(b / a for a, b in pairs)
            print(
                f"{name}: {without:.1f} ms, sharded {sharded:.1f} ms; median of ratios {ratio:.3f}"
            )
        print(f"state: {turns[0][0].state / 1e6:.1f} MB, sharded {turns[0][1].state / 1e6:.1f} MB")
    pipollux.destroy_process_group()


if __name__ == "__main__":
    main()
