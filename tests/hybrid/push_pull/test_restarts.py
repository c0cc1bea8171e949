"""Jobs that are stopped, and go on with other replicas, stages, engines and servers."""

from __future__ import annotations

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import pipollux
from tests.extent import first_points
from tests.hybrid.push_pull.jobs import servers
from tests.hybrid.replicas import run_replicas
from tests.waiting import until

SAMPLES, BATCH = 120, 4
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
    for epoch in pipollux.remaining_epochs_until(2):
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
    ("after", "stages", "processes", "num_servers"),
    first_points(1, [(1, 2, 2, 3), (3, 2, 1, 1)]),
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
            *(tmp_path, 1, 1, 20),
            environment={**running.environment(), **given},
            exit_codes=(0, 143),
        )
    with servers(num_servers, kept) as running:
        environment = {**running.environment(), **given, "LOCAL_WORLD_SIZE": str(after * processes)}
        found: list[Any] = run_replicas(
            train, after * processes, tmp_path, stages, processes, 0, environment=environment
        )
    lines = [x for path in tmp_path.glob("log-*") for x in path.read_text().splitlines()]
    assert sorted(lines) == sorted(f"{e} {i}" for e in range(2) for i in range(SAMPLES))
    assert {epoch for _, epoch, _ in found} == {2}
    assert len({value for *_, value in found}) == 1


def count(folder: Path, epochs: int, stop: int) -> list[tuple[int, int, bool]]:
    """Train a replica alone, with layers on whose samples it counts; return of each step its epoch,
    its first sample, and whether the last layer was left out. With ``stop`` it pauses there.
    """
    pipollux.init_process_group("gloo")
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)]).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = pipollux.PushPull(sync_every=2)
    wrapped = pipollux.HybridParallel(model, optimizer, synchronization=options)
    data = TensorDataset(torch.arange(SAMPLES), torch.ones(SAMPLES, 3, dtype=torch.float64))
    loader = pipollux.AdaptiveDataLoader(data, batch_size=BATCH)
    steps = []
    for epoch in pipollux.remaining_epochs_until(epochs):
        for indices, inputs in loader:
            optimizer.zero_grad()
            wrapped(inputs).square().mean().backward()
            optimizer.step()
            steps.append((epoch, int(indices[0]), model[2].weight.grad is None))
            if len(steps) == stop:  # before its push
                (folder / "here").touch()
                until((folder / "go").exists, "the files are copied", 60.0)
    return steps


@pytest.mark.exhaustive
def test_servers_files_of_different_moments(tmp_path: Path) -> None:
    """As of two servers that were killed, where an epoch had begun between their last saves."""
    early, late = tmp_path / "early", tmp_path / "late"

    def copy_files() -> None:
        until((tmp_path / "here").exists, "it has trained", 60.0)
        until(lambda: credited(late) == [18 * BATCH] * 3, "it is saved", 60.0)
        shutil.copytree(late, early)
        (tmp_path / "go").touch()

    with servers(1, late, ("--save-every", "0.01")) as running, ThreadPoolExecutor() as threads:
        copying = threads.submit(copy_files)
        (steps,) = run_replicas(count, 1, tmp_path, 2, 20, environment=running.environment())
        copying.result()
    assert len(steps) == 2 * SAMPLES / BATCH
    every = [(epoch, first) for epoch in range(2) for first in range(0, SAMPLES, BATCH)]
    for ledger, other in ((early, late), (late, early)):
        mixed = tmp_path / f"mixed-{ledger.name}"
        shutil.copytree(ledger, mixed)
        shutil.copy(other / "layer-00002.pt", mixed)
        with servers(1, mixed) as running:
            (steps,) = run_replicas(count, 1, tmp_path, 2, 0, environment=running.environment())
        # The layer that is beyond the epoch takes no part in the rest of it, nor do the others in
        # the next one if they have it.
        assert [step[:2] for step in steps] == every[18:]
        if ledger == early:
            assert [skipped for *_, skipped in steps] == [True] * len(steps)


def credited(folder: Path) -> list[int]:
    found = [torch.load(path)["credits"] for path in sorted(folder.glob("layer-*.pt"))]
    return [sum(stop - start for start, stop in spans) for spans in found]


def test_servers_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with servers(1, kept) as running:
        run_replicas(count, 1, tmp_path, 1, 0, environment=running.environment())
    layer = kept / "layer-00001.pt"
    for content, message in ((b"damaged", "layer-00001.pt cannot be read"), (None, "not of layer")):
        layer.unlink()
        if content is not None:
            layer.write_bytes(content)
        with servers(1, kept) as running:
            (found,) = run_replicas(refused, 1, tmp_path, environment=running.environment())
        assert message in found


def refused(folder: Path) -> str:
    try:
        count(folder, 2, 0)
    except pipollux.PipolluxError as error:
        return str(error)
    return ""
