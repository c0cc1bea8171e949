"""A job that evaluates in every epoch, as the docs show it, and says what each epoch came to.

    python evaluating_job.py FOLDER

It ends when it has trained two epochs with two replicas, or there is a file "end". An epoch is
three steps long, so a replica that joins finds that epochs have gone by since it was told where the
job is.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pipollux
from tests.hybrid.resize.nccl_stand_in import backend
from tests.waiting import until

FOLDER = Path(sys.argv[1])
SAMPLES = 12


class Scale(nn.Module):
    """A layer of the script's own, which another version of the script may change."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = 0.25

    def forward(self, x: Tensor) -> Tensor:
        return scaled(x) + self.offset


def scaled(x: Tensor) -> Tensor:
    return x * 1.5


def wait_until_beyond(epoch: int) -> None:
    """Return when the job has completed an epoch that this replica is in."""
    until(lambda: int((FOLDER / "epoch-0").read_text()) > epoch, "the job is beyond it")


def main() -> None:
    pipollux.init_process_group(backend())
    torch.manual_seed(0)
    inputs = torch.arange(SAMPLES, dtype=torch.float64)[:, None]
    data = TensorDataset(inputs, 2 * inputs)
    loader = pipollux.AdaptiveDataLoader(data, batch_size=4, shuffle=True)
    held_out = pipollux.AdaptiveDataLoader(data, batch_size=4)
    module = nn.Sequential(nn.Linear(1, 1).double(), Scale())
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    model = pipollux.HybridParallel(module, optimizer)
    sums = pipollux.Accumulator()
    seen: dict[int, list[float]] = {}
    together = 0
    with sums.synchronized():
        sums["epochs"] = sums.get("epochs", 0)
    for epoch in pipollux.remaining_epochs_until(100_000):
        if os.environ.get("JOINS") and not seen:
            wait_until_beyond(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for x, y in held_out:
                sums["loss"] += nn.functional.mse_loss(model(x), y) * len(x)
                sums["samples"] += len(x)
        with sums.synchronized():
            seen[epoch] = [float(sums["loss"] / sums["samples"]), float(sums["samples"])]
            sums["epochs"] += 1
            del sums["loss"], sums["samples"]
        with sums.synchronized():
            seen[epoch].append(float(sums["epochs"]))
            assert "loss" not in sums
        model.train()
        together += pipollux.num_replicas() == 2
        progress = FOLDER / f".epoch-{pipollux.replica_rank()}"
        progress.write_text(str(epoch))
        progress.replace(FOLDER / f"epoch-{pipollux.replica_rank()}")
        if together == 2 or (FOLDER / "end").exists():
            break
    (FOLDER / f"seen-{pipollux.replica_rank()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
