"""A small real training job that knows what its layers cost, for tests that cut it otherwise.

Every step goes to ``$RESULTS/steps.txt`` as (attempt, K, step, epoch, indices of the samples),
and what the parameters and the optimizer's state add up to at the begin and at the end of every
attempt to ``$RESULTS/sums.txt`` as (attempt, K, step, sum).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import pipollux
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics

SIZE = 64
WIDTH = 24
PAUSE = 0.02
"""Seconds between steps, as whoever waits for the job also needs a processor."""


def main() -> None:
    results = Path(os.environ["RESULTS"])
    pipollux.init_process_group("gloo")
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    module = nn.Sequential(*layers, nn.Linear(WIDTH, 3)).double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    inputs = torch.randn(SIZE, WIDTH, dtype=torch.float64)
    targets = torch.randint(3, (SIZE,))
    numbered = TensorDataset(inputs, targets, torch.arange(SIZE))
    loader = pipollux.AdaptiveDataLoader(numbered, batch_size=8, shuffle=True)
    model = pipollux.HybridParallel(module, optimizer, num_stages=1, example_inputs=inputs[:8])
    metrics, attempt = context().component(Metrics), context().env.attempt

    def write_sum() -> None:
        kept = [v for state in optimizer.state.values() for v in state.values()]
        total = sum(float(x.detach().double().sum()) for x in [*module.parameters(), *kept])
        with (results / "sums.txt").open("a") as file:
            print(attempt, model.num_stages, metrics.step, repr(total), file=file)

    write_sum()
    try:
        with (results / "steps.txt").open("a") as file:
            for epoch in pipollux.remaining_epochs_until(1_000_000):
                for batch, labels, indices in loader:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(batch), labels)
                    loss.backward()
                    optimizer.step()
                    pipollux.report(loss=loss)
                    where = attempt, model.num_stages, metrics.step, epoch
                    print(*where, *indices.tolist(), file=file, flush=True)
                    time.sleep(PAUSE)
    finally:
        write_sum()


if __name__ == "__main__":
    main()
