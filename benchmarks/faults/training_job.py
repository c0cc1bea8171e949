"""A small, real training job that accounts for every sample.

It uses only the library: `AdaptiveDataLoader` with a batch size that follows the goodput, a
pipeline of as many stages as the scheduler decides, checkpoints. The counts of each sample by epoch
are in an `Accumulator`, so they are saved and rolled back together with the model and the position
in the epoch. At the end they are written to `counted.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from alone import hold_alone  # same folder
from torch import Tensor, nn
from torch.utils.data import Dataset

import pipollux

NUM_SAMPLES = 256
WIDTH = 16
SAMPLE_SECONDS = 0.004
"""Artificial duration of a sample, so that training takes longer than starting."""


class Numbered(Dataset[tuple[Tensor, Tensor, int]]):
    """Points, their targets, and their numbers."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
        self.targets = self.inputs.roll(1, 1).sin()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[number], self.targets[number], number


def main() -> int:
    """Train to the end, or until asked to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    options = parser.parse_args()
    folder = Path(os.environ["PIPOLLUX_CHECKPOINT_DIR"])
    replica, attempt = (
        int(os.environ["PIPOLLUX_REPLICA"]),
        int(os.environ["PIPOLLUX_ATTEMPT"]),
    )
    alone = hold_alone(folder, replica, attempt)
    if alone is None:
        return 3
    pipollux.init_process_group()
    torch.manual_seed(0)
    counts = train(options.epochs)
    if pipollux.replica_rank() == 0:
        content = {"attempt": attempt, "epochs": counts}
        (folder / "counted.part").write_text(json.dumps(content))
        (folder / "counted.part").replace(folder / "counted.json")
    return 0


def train(num_epochs: int) -> dict[str, list[int]]:
    """Train for some epochs; return how often each sample was trained on, by epoch."""
    module = nn.Sequential(
        *(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32)),
        *(nn.Tanh(), nn.Linear(32, WIDTH)),
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    loader = pipollux.AdaptiveDataLoader(Numbered(), batch_size=32, shuffle=True)
    loader.autoscale_batch_size(64, local_bsz_bounds=(8, 32), gradient_accumulation=True)
    trained = pipollux.Accumulator()
    sample = torch.zeros(8, WIDTH)
    model = pipollux.HybridParallel(module, optimizer, num_stages=1, example_inputs=sample)
    for epoch in pipollux.remaining_epochs_until(num_epochs):
        for inputs, targets, numbers in loader:
            time.sleep(SAMPLE_SECONDS * len(numbers))
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            trained[f"epoch {epoch}"] += torch.bincount(numbers, minlength=NUM_SAMPLES)
            pipollux.report(loss=loss)
    with trained.synchronized():
        return {str(epoch): amount.tolist() for epoch, amount in trained.items()}


if __name__ == "__main__":
    sys.exit(main())
