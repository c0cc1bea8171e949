"""Cost of a training step in HybridParallel over the plain loop, DDP and torchgpipe on one GPU.

    .venv/bin/python benchmarks/gpu/overhead.py
    .venv/bin/torchrun --standalone --nproc-per-node 2 benchmarks/gpu/overhead.py --against ddp

Blocks of steps take turns, as in benchmarks/overhead, and end when the GPU has completed them. With
--compile the blocks of the transformer are compiled in both loops. Against DDP two replicas share
the GPU: NCCL_HOSTID names a host for each, so NCCL connects them by sockets.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from model import SIZES, Size, data, layers, loss_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchgpipe import GPipe

import pipollux
from pipollux_hybrid.job import context as contexts

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "overhead"))
from turns import Comparison

BATCHES, MICROBATCHES = 64, 4
AGAINST = {"plain": "plain loop", "ddp": "DDP, R = 2", "torchgpipe": "torchgpipe, K = 2, M = 4"}
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


def model_of(size: Size, backend: str | None) -> nn.Sequential:
    """Return the layers, the blocks compiled by a backend of torch.compile."""
    module = layers(size)
    for index in range(1, 1 + size.blocks) if backend else ():
        module[index] = torch.compile(module[index], backend=backend, dynamic=False)
    return module


def reference(size: Size, device: str, against: str, backend: str | None) -> Loop:
    """The loop without Pipollux; batches are moved to the device on arrival."""
    model: nn.Module = model_of(size, backend)
    if against == "torchgpipe":
        half = [1 + size.blocks // 2, 1 + size.blocks - size.blocks // 2]
        model = GPipe(model, half, devices=[device] * 2, chunks=MICROBATCHES)
    else:
        model = model.to(device)
    if against == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    rank, world = pipollux.replica_rank(), pipollux.num_replicas()
    firsts = range(rank * size.batch, BATCHES * size.batch, world * size.batch)
    shares = [range(first, first + size.batch) for first in firsts]
    loader = DataLoader(data(size, BATCHES), batch_sampler=shares, pin_memory=device != "cpu")

    def batches() -> Iterator[list[Tensor]]:
        while True:
            for batch in loader:
                yield [x.to(device, non_blocking=True) for x in batch]

    return steps(batches(), model, optimizer)


def ours(size: Size, device: str, against: str, backend: str | None) -> Loop:
    """The loop with Pipollux."""
    module = model_of(size, backend)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    batch_size = pipollux.num_replicas() * size.batch
    loader = pipollux.AdaptiveDataLoader(
        data(size, BATCHES), batch_size=batch_size, pin_memory=device != "cpu"
    )
    stages = 2 if against == "torchgpipe" else 1
    model = pipollux.HybridParallel(
        module,
        optimizer,
        num_stages=stages,
        num_microbatches=MICROBATCHES if against == "torchgpipe" else 1,
        devices=[device] * stages,
        activation_checkpoint="except_last",
    )

    def batches() -> Iterator[list[Tensor]]:
        for _ in pipollux.remaining_epochs_until(10**6):
            yield from loader

    return steps(batches(), model, optimizer)


def agree(device: str, number: int) -> int:
    """Return rank 0's number."""
    if pipollux.num_replicas() == 1:
        return number
    tensor = torch.tensor(number, device=device)
    dist.broadcast(tensor, 0)
    return int(tensor)


def compare(name: str, against: str, backend: str | None, options: argparse.Namespace) -> None:
    """Compare two loops, and print a row of the table."""
    device = options.device
    contexts.reset()
    gc.collect()
    torch._dynamo.reset()
    if device != "cpu":
        torch.cuda.empty_cache()
    finish = torch.cuda.synchronize if device != "cpu" else lambda: None
    compared = Comparison(partial(agree, device), finish)
    loops = (make(SIZES[name], device, against, backend) for make in (reference, ours))
    compared.run(*loops, options.steps, options.seconds)
    _, *figures = compared.rows()[0]
    row = [name, AGAINST[against], "yes" if backend else "no", sum(compared.lengths), *figures]
    if pipollux.replica_rank() == 0:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", nargs="+", choices=AGAINST, default=["plain", "torchgpipe"])
    parser.add_argument("--steps", type=int, default=300, help="of each loop")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of a comparison")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "medium"])
    parser.add_argument("--compile", action="store_true", help="then also compiled blocks")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    # torch.compile reads the gradients of inputs, in the plain loop as well.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    os.environ["NCCL_HOSTID"] = f"p{os.environ.get('RANK', '0')}"
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    if options.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(options.device)
    ddp = "ddp" in options.against
    pipollux.init_process_group("nccl" if ddp and options.device != "cpu" else "gloo")
    if ddp != (pipollux.num_replicas() == 2):
        parser.error("--against ddp needs two processes, and the others one")
    if pipollux.replica_rank() == 0:
        print(
            "| model | against | compiled | steps | it, ms | ours, ms | adds, ms "
            "| ratio (quartiles) | adds on average of all steps, ms (ratio) |\n"
            "|---|---|---|---|---|---|---|---|---|",
            flush=True,
        )
    for backend in (None, options.backend) if options.compile else (None,):
        for name in options.sizes:
            for against in options.against:
                compare(name, against, backend, options)
    pipollux.destroy_process_group()


if __name__ == "__main__":
    main()
