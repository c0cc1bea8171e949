"""CPU time of a step where every stage loads whole batches, and where each loads its part.

    .venv/bin/torchrun --standalone --nproc-per-node 4 benchmarks/engines/loading.py

Four processes, one for each stage of a small model. Two loaders over the same data take turns by
epochs. To load an input, ``zlib`` inflates it, which takes about 2 ms, or nothing is to do; targets
are in memory. What counts is the CPU time of all processes together, which other load on the
machine changes less than wall time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, StackDataset

import pipollux

SAMPLES, BATCH_SIZE, WIDTH = 256, 32, 16


class Inflated(Dataset[Tensor]):
    """Inputs that are inflated from some bytes; without any, they are free."""

    def __init__(self, size: int) -> None:
        self.deflated = zlib.compress(os.urandom(size // 4) + bytes(size - size // 4))

    def __len__(self) -> int:
        """Return the number of samples."""
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        """Load one input, shape [WIDTH]."""
        zlib.decompress(self.deflated)
        return torch.full((WIDTH,), index / SAMPLES)


def main() -> None:
    """Print CPU milliseconds per step of both loaders, and their difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    stages = int(os.environ["WORLD_SIZE"])
    pipollux.init_process_group("gloo", processes_per_replica=stages)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(stages)))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    loaders = {
        (name, per_stage): pipollux.AdaptiveDataLoader(
            StackDataset(Inflated(size), torch.zeros(SAMPLES, WIDTH)),
            BATCH_SIZE,
            shuffle=True,
            load_per_stage=per_stage,
        )
        for name, size in {"2 ms": 800_000, "free": 0}.items()
        for per_stage in (False, True)
    }
    model = pipollux.HybridParallel(module, optimizer, num_stages=stages, num_microbatches=stages)
    found: dict[tuple[str, bool], list[float]] = {kind: [] for kind in loaders}
    for epoch in pipollux.remaining_epochs_until(rounds + 1):
        for kind, loader in loaders.items():
            begin = time.process_time()
            for inputs, targets in loader:
                optimizer.zero_grad()
                model.train_step(inputs, targets, F.mse_loss)
                optimizer.step()
            spent = torch.tensor(time.process_time() - begin)
            dist.all_reduce(spent)
            if epoch:  # the first one warms up
                found[kind].append(1e3 * float(spent) * BATCH_SIZE / SAMPLES)
    if pipollux.process_rank() == 0:
        for name in ("2 ms", "free"):
            whole, parts = found[name, False], found[name, True]
            added = [part - all_ for part, all_ in zip(parts, whole, strict=True)]
            low, middle, high = statistics.quantiles(added)
            print(
                f"inputs of {name}: CPU ms a step, all processes: whole batches "
                f"{statistics.median(whole):.1f}, per stage {statistics.median(parts):.1f}, "
                f"difference {middle:+.1f} ({low:+.1f} to {high:+.1f})"
            )


if __name__ == "__main__":
    main()
