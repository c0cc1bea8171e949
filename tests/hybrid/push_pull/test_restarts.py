"""Jobs that are stopped, and go on with other replicas, stages, engines and servers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import pipollux
from tests.hybrid.push_pull.jobs import servers
from tests.hybrid.replicas import run_replicas

SAMPLES, BATCH = 240, 4
OUTER = pipollux.OuterSGD(lr=1.0, momentum=0.0, nesterov=False)
OPTIONS = {"sync_every": 3, "fragments": 2, "outer_optimizer": OUTER, "adapt_to_speed": False}


def train(folder: Path, stages: int, processes: int, stop: int) -> tuple[list[int], int, float]:
    """Train; return the samples, and at the end the schedule's epoch and a parameter."""
    pipollux.init_process_group("gloo", processes_per_replica=processes)
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)]).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    wrapped = pipollux.HybridParallel(
        model,
        optimizer,
        num_stages=stages,
        num_microbatches=2,
        lr_scheduler=schedule,
        synchronization=pipollux.PushPull(**OPTIONS),
    )
    data = TensorDataset(torch.arange(SAMPLES), torch.ones(SAMPLES, 3, dtype=torch.float64))
    loader = pipollux.AdaptiveDataLoader(data, batch_size=BATCH, shuffle=True)
    log = folder / f"log-{os.getpid()}"
    steps = 0
    for epoch in pipollux.remaining_epochs_until(3):
        for indices, inputs in loader:
            optimizer.zero_grad()
            wrapped.train_step(inputs, inputs, nn.functional.mse_loss)
            optimizer.step()
            if pipollux.process_rank() % processes == 0:
                with log.open("a") as file:
                    file.writelines(f"{epoch} {index}\n" for index in indices.tolist())
            steps += 1
            if steps == stop:
                os.kill(os.getpid(), signal.SIGTERM)
        schedule.step()
    return [], schedule.last_epoch, float(wrapped.state_dict()["0.weight"].sum())


@pytest.mark.parametrize(
    ("after", "stages", "processes", "num_servers"), [(3, 2, 1, 1), (1, 2, 2, 3)]
)
def test_a_stopped_job_goes_on(
    after: int, stages: int, processes: int, num_servers: int, tmp_path: Path
) -> None:
    kept, saved = tmp_path / "servers", tmp_path / "checkpoints"
    given = {"PIPOLLUX_CHECKPOINT_DIR": str(saved)}
    with servers(2, kept) as running:
        run_replicas(
            train,
            2,
            *(tmp_path, 1, 1, 40),
            environment={**running.environment(), **given},
            exit_codes=(0, 143),
        )
    with servers(num_servers, kept) as running:
        environment = {**running.environment(), **given, "LOCAL_WORLD_SIZE": str(after * processes)}
        found: list[Any] = run_replicas(
            train, after * processes, tmp_path, stages, processes, 0, environment=environment
        )
    lines = [x for path in tmp_path.glob("log-*") for x in path.read_text().splitlines()]
    assert sorted(lines) == sorted(f"{e} {i}" for e in range(3) for i in range(SAMPLES))
    assert {epoch for _, epoch, _ in found} == {3}
    assert len({value for *_, value in found}) == 1
