"""A small job whose replicas push and pull under a scheduler.

Every step of a replica goes to ``$RESULTS/ATTEMPT-ID.txt`` as a line of JSON. It trains for
``$EPOCHS`` epochs, or until it is stopped, and has ``$WIDTH`` parameters per sample. Epoch 5 begins
when there is the file ``$GOES_ON``, if that is given.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import pipollux
from pipollux_hybrid.job.context import context

SIZE = 120
PAUSE = 0.05
"""Seconds of a step, as whoever waits for the job also needs a processor."""

HELD = 5
"""The epoch that waits for ``$GOES_ON``."""


def main() -> None:
    pipollux.init_process_group("gloo", timeout=120.0)
    torch.manual_seed(1)
    width = int(os.environ.get("WIDTH", "4"))
    module = nn.Sequential(nn.Embedding(SIZE, width), nn.Linear(width, 1)).double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    loader = pipollux.AdaptiveDataLoader(TensorDataset(torch.arange(SIZE)), 4, shuffle=True)
    options = pipollux.PushPull(sync_every=3, fragments=2, max_staleness=float("inf"))
    model = pipollux.HybridParallel(module, optimizer, devices=["cpu"], synchronization=options)
    env = context().env
    with (Path(os.environ["RESULTS"]) / f"{env.attempt}-{env.replica}.txt").open("a") as log:
        for epoch in pipollux.remaining_epochs_until(int(os.environ.get("EPOCHS", "1000000"))):
            while epoch == HELD and not Path(os.environ.get("GOES_ON", "/")).exists():
                time.sleep(PAUSE)
            for (numbers,) in loader:
                optimizer.zero_grad()
                loss = (model(numbers) - 1.0).square().mean()
                loss.backward()
                optimizer.step()
                pipollux.report(loss=loss)
                line = {"epoch": epoch, "numbers": numbers.tolist()}
                print(json.dumps(line), file=log, flush=True)
                time.sleep(PAUSE)


if __name__ == "__main__":
    main()
