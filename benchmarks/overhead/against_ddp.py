"""Cost of a training step in HybridParallel over the same step in DistributedDataParallel.

Two replicas of one stage and one thread each over gloo; the same batches, from torch's DataLoader
and from an AdaptiveDataLoader.

    .venv/bin/torchrun --nproc-per-node 2 benchmarks/overhead/against_ddp.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from turns import OPTIMIZERS, SIZES, Comparison, Shares, Size, dataset, mlp, run_all, steps

import pipollux
from pipollux_hybrid.job import context as contexts

Batches = Iterator[tuple[Tensor, Tensor]]


def ddp(size: Size, optimizer: str) -> Iterator[Tensor]:
    """The loop without Pipollux."""
    model = DistributedDataParallel(mlp(size))
    world = dist.get_world_size()
    shares = Shares(world * size.batch, world, dist.get_rank())
    loader = DataLoader(dataset(), batch_sampler=shares)

    def batches() -> Batches:
        while True:
            yield from loader

    return steps(batches(), model, OPTIMIZERS[optimizer](model.parameters()))


def ours(size: Size, optimizer: str) -> Iterator[Tensor]:
    """The loop with Pipollux."""
    module = mlp(size)
    stepper = OPTIMIZERS[optimizer](module.parameters())
    batch_size = dist.get_world_size() * size.batch
    loader = pipollux.AdaptiveDataLoader(dataset(), batch_size=batch_size, shuffle=True)
    model = pipollux.HybridParallel(module, stepper)

    def batches() -> Batches:
        for _ in pipollux.remaining_epochs_until(10**6):
            yield from loader

    return steps(batches(), model, stepper)


def both(size: Size, optimizer: str) -> tuple[Iterator[Tensor], Iterator[Tensor]]:
    """Both loops, in a new job of the same replicas."""
    contexts.reset()
    return ddp(size, optimizer), ours(size, optimizer)


def agree(length: int) -> int:
    """Rank 0's number."""
    number = torch.tensor(length)
    dist.broadcast(number, 0)
    return int(number)


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead over DistributedDataParallel.")
    parser.add_argument("--steps", type=int, default=1000, help="of each loop, 1000")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    pipollux.init_process_group("gloo")
    rank = pipollux.replica_rank()
    run_all(
        args.sizes,
        both,
        args.steps,
        lambda line: print(line, flush=True) if rank == 0 else None,
        lambda: Comparison(agree=agree),
    )


if __name__ == "__main__":
    main()
