"""Step time with a process for each stage, against the plain model and torch's own pipelining.

    .venv/bin/torchrun --standalone --nproc-per-node 2 benchmarks/engines/engines.py

Two processes of one thread each, and two stages. All variants run in the same two processes and
take turns, so that other load affects all alike; while one process works alone, the other waits in
a collective. The results are ratios of neighbouring blocks of steps.

* ``plain``: the whole model and batch in one process: the baseline without pipelines.
* ``halves``: each process trains a plain model on half of the batch, and nothing is sent: the
  maximum gain of two processes on this machine.
* ``torch``: torch.distributed.pipelining by hand, Schedule1F1B.
* ``1f1b``, ``interleaved`` (two chunks per stage) and ``gpipe``: HybridParallel with these
  schedules, in a loop over its loader; a block of steps is an epoch, so it includes the beginning
  of a loop.
* ``torchgpipe``: GPipe in one process, on two CPU devices.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import TensorDataset
from torchgpipe import GPipe

import pipollux
from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.job.context import context

CLASSES = 64
Steps = Callable[[int], None]
"""Makes that many steps."""


class FeedForward(nn.Module):
    """Inputs [batch, width] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Block(nn.Module):
    """A transformer's, inputs [batch, length, width] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.feed_forward = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        parts = self.mix(self.norm(x)).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.feed_forward(x + mixed.transpose(1, 2).flatten(2))


class Classify(nn.Module):
    """Classes of each sample; of a text by the mean over its tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, [batch, classes]."""
        return self.head(x.mean(1) if x.dim() == 3 else x)


def mlp(batch: int = 512) -> tuple[list[nn.Module], TensorDataset]:
    """Six blocks of width 512."""
    layers = [*(FeedForward(512) for _ in range(6)), Classify(512)]
    return layers, TensorDataset(torch.randn(batch, 512), torch.randint(CLASSES, (batch,)))


def transformer() -> tuple[list[nn.Module], TensorDataset]:
    """Four blocks of width 256, batches of 32 texts of 96 tokens."""
    layers = [nn.Embedding(CLASSES, 256), *(Block(256) for _ in range(4)), Classify(256)]
    texts = torch.randint(CLASSES, (32, 96))
    return layers, TensorDataset(texts, texts[:, 0])


CHUNKS = {"mlp": [2, 1, 1, 3], "mlp-2048": [2, 1, 1, 3], "transformer": [2, 1, 1, 2]}
"""Layers of each of four chunks, two per stage."""
MODELS = {
    "mlp": (mlp, [3, 4]),
    "mlp-2048": (functools.partial(mlp, 2048), [3, 4]),
    "transformer": (transformer, [3, 3]),
}
"""The factory of each, and the number of layers of each stage."""


def make(name: str) -> tuple[nn.Sequential, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(0)
    layers, data = MODELS[name][0]()
    module = nn.Sequential(*layers)
    return module, torch.optim.SGD(module.parameters(), lr=0.01), data


def whole(name: str, share: int, alone: bool, cut: Callable[[nn.Sequential], nn.Module]) -> Steps:
    """A model in one process, on a share of the batch; alone, or in both at once."""
    module, optimizer, data = make(name)
    model, (inputs, targets) = cut(module), data.tensors
    inputs, targets = inputs[: len(inputs) // share], targets[: len(targets) // share]

    def steps(count: int) -> None:
        for _ in range(0 if alone and dist.get_rank() > 0 else count):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    return steps


def by_hand(name: str, num_microbatches: int) -> Steps:
    """Torch's own, as in its tutorial: each process creates its half of the model."""
    module, _, data = make(name)
    rank, balance = dist.get_rank(), MODELS[name][1]
    mine = module[: balance[0]] if rank == 0 else module[balance[0] :]
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.01)
    stage = PipelineStage(mine, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=F.cross_entropy)
    inputs, targets = data.tensors

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=targets, losses=[])
            optimizer.step()

    return steps


def ours(name: str, num_microbatches: int, schedule: str, count: int) -> Steps:
    module, optimizer, data = make(name)
    context().component(States).pop("model.pt", None)
    model = pipollux.HybridParallel(
        module,
        optimizer,
        balance=CHUNKS[name] if schedule == "interleaved" else MODELS[name][1],
        num_microbatches=num_microbatches,
        activation_checkpoint="never",
        schedule=schedule,
    )
    repeated = TensorDataset(*(x.repeat(count, *[1] * (x.dim() - 1)) for x in data.tensors))
    loader = pipollux.AdaptiveDataLoader(repeated, batch_size=len(data))

    def steps(_count: int) -> None:
        for inputs, targets in loader:
            optimizer.zero_grad()
            model.train_step(inputs, targets, F.cross_entropy)
            optimizer.step()

    return steps


def seconds(steps: Steps, count: int) -> float:
    dist.barrier()
    begin = time.perf_counter()
    steps(count)
    dist.barrier()
    return (time.perf_counter() - begin) / count


def compare(name: str, num_microbatches: int, rounds: int, count: int) -> None:
    contestants: dict[str, Steps] = {
        "plain": whole(name, 1, True, lambda module: module),
        "halves": whole(name, 2, False, lambda module: module),
        "torch": by_hand(name, num_microbatches),
        "1f1b": ours(name, num_microbatches, "1f1b", count),
        "interleaved": ours(name, num_microbatches, "interleaved", count),
        "gpipe": ours(name, num_microbatches, "gpipe", count),
        "torchgpipe": whole(
            name,
            1,
            True,
            lambda module: GPipe(
                module,
                MODELS[name][1],
                devices=["cpu"] * 2,
                chunks=num_microbatches,
                checkpoint="never",
            ),
        ),
    }
    for steps in contestants.values():
        steps(count)
    times: dict[str, list[float]] = {each: [] for each in contestants}
    for _ in range(rounds):
        for each, steps in contestants.items():
            times[each].append(seconds(steps, count))
    if dist.get_rank() == 0:
        show(name, num_microbatches, times)


def show(name: str, num_microbatches: int, times: dict[str, list[float]]) -> None:
    bubble = 1 / (num_microbatches + 1)
    print(f"\n{name}, M = {num_microbatches} (bubble of the schedule {bubble:.0%})\n")
    print("| | step, ms (fastest) | plain / it (quartiles) | torch / it (quartiles) |")
    print("|---|---|---|---|")
    for each, found in times.items():
        row: list[Any] = [each, f"{1e3 * statistics.median(found):.0f} ({1e3 * min(found):.0f})"]
        for other in ("plain", "torch"):
            ratios = [a / b for a, b in zip(times[other], found, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            row.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--count", type=int, default=4, help="steps of a block")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    pipollux.init_process_group("gloo", processes_per_replica=2)
    for name in options.models:
        for num_microbatches in options.microbatches:
            compare(name, num_microbatches, options.rounds, options.count)


if __name__ == "__main__":
    main()
