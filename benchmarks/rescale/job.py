"""The job of the benchmark: it records when each of its steps ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import pipollux
from pipollux_hybrid.job.context import context


def mean_square(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


def main() -> None:
    processes = int(os.environ.get("PROCESSES", "1"))
    pipollux.init_process_group("gloo", processes_per_replica=processes)
    width, layers = 1024, int(os.environ["LAYERS"])
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(module.parameters())
    loader = pipollux.AdaptiveDataLoader(
        TensorDataset(torch.randn(1, width).expand(1_000_000, width)), batch_size=12
    )
    stages = int(os.environ["STAGES"])
    model = pipollux.HybridParallel(module, optimizer, num_stages=stages, num_microbatches=stages)
    log = Path(os.environ["TIMES"], str(os.getpid())).open("a")  # noqa: SIM115  # to the end
    for _ in pipollux.remaining_epochs_until(1):
        for (inputs,) in loader:
            optimizer.zero_grad()
            if processes > 1:
                model.train_step(inputs, inputs, mean_square)
            else:
                model(inputs).square().mean().backward()
            optimizer.step()
            step, replicas = context().step, pipollux.num_replicas()
            print(time.time(), step, pipollux.replica_rank(), replicas, file=log, flush=True)


if __name__ == "__main__":
    main()
