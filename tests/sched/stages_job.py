"""A small real training job whose stages have processes of their own, if the scheduler says so.

Every step of a process goes to ``$RESULTS/ATTEMPT-REPLICA-STAGE.txt`` as a line of JSON.
"""

from __future__ import annotations

import json
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

SIZE = 90


def main() -> None:
    pipollux.init_process_group("gloo", timeout=120.0)
    torch.manual_seed(1)
    layers = nn.Embedding(SIZE, 8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    module = nn.Sequential(*layers).double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    loader = pipollux.AdaptiveDataLoader(TensorDataset(torch.arange(SIZE)), 6, shuffle=True)
    model = pipollux.HybridParallel(module, optimizer, schedule="1f1b", check_replicas=True)
    metrics, env = context().component(Metrics), context().env
    name = f"{env.attempt}-{env.replica}-{env.stage}.txt"
    log = (Path(os.environ["RESULTS"]) / name).open("a")
    for epoch in pipollux.remaining_epochs_until(int(os.environ.get("EPOCHS", "1000000"))):
        for (numbers,) in loader:
            # Not before the loop: one that joins learns in it how far the others are.
            done = metrics.step
            optimizer.zero_grad()
            loss = model.train_step(numbers, numbers % 3, F.cross_entropy)
            optimizer.step()
            pipollux.report(loss=loss)
            if metrics.step == done:
                continue  # a replica was lost, and the step is done again
            line = {
                "step": metrics.step,
                "epoch": epoch,
                "replica": pipollux.replica_rank(),
                "stage": env.stage,
                "stages": model.num_stages,
                "processes": context().env.world_size,
                "loss": float(loss),
                "numbers": numbers.tolist(),
            }
            print(json.dumps(line), file=log, flush=True)
            time.sleep(0.02)  # as whoever waits for the job also needs a processor


if __name__ == "__main__":
    main()
