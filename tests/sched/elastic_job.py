"""A small real training job whose replicas come and go under a scheduler.

Every step of a replica goes to ``$RESULTS/ID.txt`` as a line of JSON, ID being what the scheduler
knows it by.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
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
PAUSE = float(os.environ.get("PAUSE", "0.02"))
"""Seconds between steps, as whoever waits for the job also needs a processor."""


def backend() -> str:
    """Return gloo, or what ``$BACKEND`` names in the place of NCCL."""
    if "BACKEND" not in os.environ:
        return "gloo"
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.hybrid.resize import nccl_stand_in

    return nccl_stand_in.backend()


def main() -> None:
    if "SCALARS" in os.environ:
        os.environ["PIPOLLUX_TENSORBOARD_DIR"] = os.environ["SCALARS"]
    pipollux.init_process_group(backend(), timeout=120.0)
    if os.environ["PIPOLLUX_JOINS"] == "1" and "NEWCOMER" in os.environ:
        exec(os.environ["NEWCOMER"])  # noqa: S102  # what the test wants a joining replica to do
    torch.manual_seed(1)
    module = nn.Sequential(nn.Embedding(SIZE, 8), nn.Dropout(0.2), nn.Linear(8, 3)).double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    loader = pipollux.AdaptiveDataLoader(TensorDataset(torch.arange(SIZE)), 6, shuffle=True)
    model = pipollux.HybridParallel(module, optimizer, num_stages=1, check_replicas=True)
    metrics, env = context().component(Metrics), context().env
    log = (Path(os.environ["RESULTS"]) / f"{env.attempt}-{env.replica}.txt").open("a")
    for epoch in pipollux.remaining_epochs_until(int(os.environ.get("EPOCHS", "1000000"))):
        for (numbers,) in loader:
            # Not before the loop: one that joins learns in it how far the others are.
            done = metrics.step
            optimizer.zero_grad()
            loss = F.cross_entropy(model(numbers), numbers % 3)
            loss.backward()
            optimizer.step()
            pipollux.report(loss=loss)
            if metrics.step == done:
                continue  # another replica has died, and this batch is done again
            part = context().batch.micro_step
            assert part is not None
            assert all(bool(p.isfinite().all()) for p in module.parameters())
            content = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
            line = {
                "attempt": env.attempt,
                "step": metrics.step,
                "epoch": epoch,
                "rank": pipollux.replica_rank(),
                "replicas": pipollux.num_replicas(),
                "nodes": context().env.num_nodes,
                "numbers": numbers[: part.num_samples].tolist(),
                "parameters": hashlib.sha256(content).hexdigest()[:16],
            }
            print(json.dumps(line), file=log, flush=True)
            time.sleep(PAUSE)


if __name__ == "__main__":
    main()
