"""A training script that writes down its losses, and stops by itself.

It appends to ``$RESULTS/losses-G-RANK.txt`` the step, the samples and the mean loss of each batch.
At step ``$STOP_AT`` one replica sends itself SIGTERM.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import pipollux
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics


def main() -> None:
    pipollux.init_process_group("gloo")
    torch.manual_seed(1)
    module = nn.Sequential(
        *(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 16)),
        *(nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)),
    ).double()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(100, 6, generator=generator, dtype=torch.float64)
    data = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=15, gamma=0.7)
    loader = pipollux.AdaptiveDataLoader(data, batch_size=9, shuffle=True)
    model = pipollux.HybridParallel(
        module,
        optimizer,
        num_microbatches=int(os.environ["MICROBATCHES"]),
        activation_checkpoint=os.environ["MODE"],
        lr_scheduler=schedule,
    )
    rank, stop_at = pipollux.replica_rank(), int(os.environ["STOP_AT"])
    name = f"losses-{context().env.attempt}-{rank}.txt"
    with (Path(os.environ["RESULTS"]) / name).open("a") as log:
        for _ in pipollux.remaining_epochs_until(4):
            for batch, targets in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(batch), targets)
                loss.backward()
                optimizer.step()
                schedule.step()
                micro_step, step = context().batch.micro_step, context().component(Metrics).step
                assert micro_step is not None
                print(step, micro_step.num_samples, repr(loss.item()), file=log, flush=True)
                if step == stop_at and rank == pipollux.num_replicas() - 1:
                    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
