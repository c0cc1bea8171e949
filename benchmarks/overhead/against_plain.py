"""Cost of a training step in HybridParallel over the same step in the plain PyTorch loop.

One process, one stage, one replica, one thread; the same batches, from torch's DataLoader and from
an AdaptiveDataLoader.

    .venv/bin/python benchmarks/overhead/against_plain.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from turns import OPTIMIZERS, SIZES, Shares, Size, dataset, mlp, run_all, steps

import pipollux

Batches = Iterator[tuple[Tensor, Tensor]]


def plain(size: Size, optimizer: str) -> Iterator[Tensor]:
    """The loop without Pipollux."""
    model = mlp(size)
    loader = DataLoader(dataset(), batch_sampler=Shares(size.batch, 1, 0))

    def batches() -> Batches:
        while True:
            yield from loader

    return steps(batches(), model, OPTIMIZERS[optimizer](model.parameters()))


def ours(size: Size, optimizer: str) -> Iterator[Tensor]:
    """The loop with Pipollux, in a new job."""
    pipollux.destroy_process_group()
    pipollux.init_process_group()
    module = mlp(size)
    stepper = OPTIMIZERS[optimizer](module.parameters())
    loader = pipollux.AdaptiveDataLoader(dataset(), batch_size=size.batch, shuffle=True)
    model = pipollux.HybridParallel(module, stepper)

    def batches() -> Batches:
        for _ in pipollux.remaining_epochs_until(10**6):
            yield from loader

    return steps(batches(), model, stepper)


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead over the plain loop.")
    parser.add_argument("--steps", type=int, default=1000, help="of each loop, 1000")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    run_all(
        args.sizes,
        lambda size, optimizer: (plain(size, optimizer), ours(size, optimizer)),
        args.steps,
        lambda line: print(line, flush=True),
    )


if __name__ == "__main__":
    main()
