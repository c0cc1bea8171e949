"""Cost of a training step in HybridParallel on a GPU over the plain loop, and over torchgpipe.

    .venv/bin/python benchmarks/gpu/overhead.py

One process, one replica, one GPU for all stages. Blocks of steps take turns, as in
benchmarks/overhead, and end when the GPU has completed them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from model import SIZES, Size, data, layers, loss_of
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchgpipe import GPipe

import pipollux

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "overhead"))
from turns import Comparison

BATCHES, MICROBATCHES = 64, 4
Loop = Iterator[Tensor]


def steps(
    batches: Iterator[list[Tensor]], model: nn.Module, optimizer: torch.optim.Optimizer
) -> Loop:
    """The loop of a training script; yields the loss of each step."""
    for codes, targets in batches:
        optimizer.zero_grad()
        loss = loss_of(model(codes), targets)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def reference(size: Size, device: str, wrap: Callable[[nn.Module], nn.Module]) -> Loop:
    """The loop without Pipollux; batches are moved to the device on arrival."""
    model = wrap(layers(size).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    loader = DataLoader(data(size, BATCHES), batch_size=size.batch, pin_memory=device != "cpu")

    def batches() -> Iterator[list[Tensor]]:
        while True:
            for batch in loader:
                yield [x.to(device, non_blocking=True) for x in batch]

    return steps(batches(), model, optimizer)


def ours(size: Size, device: str, stages: int, microbatches: int) -> Loop:
    """The loop with Pipollux."""
    pipollux.destroy_process_group()
    pipollux.init_process_group()
    module = layers(size)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    loader = pipollux.AdaptiveDataLoader(
        data(size, BATCHES), batch_size=size.batch, pin_memory=device != "cpu"
    )
    model = pipollux.HybridParallel(
        module,
        optimizer,
        num_stages=stages,
        num_microbatches=microbatches,
        devices=[device] * stages,
        activation_checkpoint="except_last",
    )

    def batches() -> Iterator[list[Tensor]]:
        for _ in pipollux.remaining_epochs_until(10**6):
            yield from loader

    return steps(batches(), model, optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "medium"])
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    print(
        "| model | against | clock | it, ms | ours, ms | adds, ms | ratio (quartiles) | all steps |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in options.sizes:
        size, device = SIZES[name], options.device
        half = [1 + size.blocks // 2, 1 + size.blocks - size.blocks // 2]

        def piped(module: nn.Module, half: list[int] = half, device: str = device) -> nn.Module:
            return GPipe(module, half, devices=[device] * 2, chunks=MICROBATCHES)

        for against, wrap, stages, count in (
            ("plain loop", lambda module: module, 1, 1),
            ("torchgpipe, K = 2, M = 4", piped, 2, MICROBATCHES),
        ):
            compared = Comparison()
            loops = reference(size, device, wrap), ours(size, device, stages, count)
            compared.run(*loops, options.steps)
            for row in compared.rows():
                print(f"| {name} | {against} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
