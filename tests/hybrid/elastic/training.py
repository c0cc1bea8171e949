"""A training script for tests of whole runs, which are stopped by signals.

It appends to ``$RESULTS/samples-G-RANK.txt`` every index it trained on, writes ``$RESULTS/step`` as
it goes, and at the end the parameters to ``$RESULTS/final.pt``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import pipollux
from pipollux_hybrid.job import signals
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics

RESULTS = Path(os.environ.get("RESULTS", "."))
SIZE = 84
EPOCHS = 2


class Numbered(Dataset[tuple[Tensor, Tensor, int]]):
    """Random samples that know their index."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SIZE, 6, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(3, (SIZE,), generator=generator)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.targets[index], index


def hold(step: int) -> None:
    """Wait at a step until the test has seen it, so that signals land where they are meant to."""
    gate = RESULTS / f"hold-{step}"
    if not gate.exists():
        return
    (RESULTS / f"reached-{step}-{pipollux.process_rank()}").touch()
    while gate.exists():
        if signals.stop_requested():
            (RESULTS / f"asked-{step}-{pipollux.process_rank()}").touch()
        time.sleep(0.002)


def main() -> None:
    pipollux.init_process_group("gloo")
    torch.manual_seed(1)
    # Dropout makes the parameters depend on random numbers going on where they stopped.
    module = nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    ).double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    loader = pipollux.AdaptiveDataLoader(Numbered(), batch_size=7, shuffle=True)
    model = pipollux.HybridParallel(module, optimizer, num_stages=2, num_microbatches=2)
    rank, attempt = pipollux.replica_rank(), context().env.attempt
    log = (RESULTS / f"samples-{attempt}-{rank}.txt").open("a")
    for epoch in pipollux.remaining_epochs_until(EPOCHS):
        for inputs, targets, indices in loader:
            hold(context().component(Metrics).step)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            pipollux.report(loss=loss)
            micro_step = context().batch.micro_step
            assert micro_step is not None
            if micro_step.num_samples:
                print(
                    context().component(Metrics).step,
                    epoch,
                    *indices.tolist(),
                    file=log,
                    flush=True,
                )
    if rank == 0:
        torch.save(module.state_dict(), RESULTS / "final.pt")


if __name__ == "__main__":
    main()
