"""Worker processes of loaders: in order, with the user's options, and gone when they should be."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from pipollux_hybrid import AdaptiveDataLoader, remaining_epochs_until
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.extent import first_points
from tests.programs import Command, Forked
from tests.waiting import until

SIZE = 40


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


class Told(Dataset[tuple[int, int, int]]):
    """Samples that tell who fetched them."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return index, os.getpid(), int(os.environ.get("SET_BY_WORKER", "-1"))


def start_worker(worker_id: int) -> None:
    os.environ["SET_BY_WORKER"] = str(worker_id)


def keep_list(samples: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return samples


def workers() -> int:
    """Number of loaders' workers that are alive."""
    return len(multiprocessing.active_children())


def make(**options: object) -> AdaptiveDataLoader:
    return AdaptiveDataLoader(Told(), 6, True, seed=2, collate_fn=keep_list, **options)


def test_two_workers_keep_the_order_and_take_the_options() -> None:
    loader = make(num_workers=2, worker_init_fn=start_worker, prefetch_factor=3)
    alone = [[sample[0] for sample in batch] for batch in make()]
    batches = list(loader)
    assert [[sample[0] for sample in batch] for batch in batches] == alone
    assert {sample[2] for batch in batches for sample in batch} == {0, 1}
    assert os.getpid() not in {sample[1] for batch in batches for sample in batch}


def test_workers_end_with_their_loop() -> None:
    loader, before = make(num_workers=2), workers()
    for _ in loader:
        assert workers() == before + 2
    assert workers() == before
    for _ in loader:
        break
    assert workers() == before


def test_persistent_workers_stay_over_epochs_and_batch_sizes() -> None:
    loader = make(num_workers=2, persistent_workers=True)
    loader.autoscale_batch_size(12, (1, 12))
    pids, sizes = set(), set()
    for epoch in range(3):
        indices = []
        for number, batch in enumerate(loader):
            indices += [sample[0] for sample in batch]
            pids |= {sample[1] for sample in batch}
            sizes.add(len(batch))
            if epoch == 1 and number == 2:
                break
            if number == 1:
                context().component(Metrics)._proposal = (6 + epoch + 1, 0, 0)
        if epoch != 1:
            assert sorted(indices) == list(range(SIZE))
    assert len(pids) == 2
    assert {6, 7, 9} <= sizes


def test_a_stop_that_reaches_the_whole_group_leaves_the_workers_at_work() -> None:
    """As torchrun's agent and terminals send it."""
    taken = 0
    for number, batch in enumerate(make(num_workers=2)):
        taken += len(batch)
        if number == 0:
            for pid in {sample[1] for sample in batch}:
                os.kill(pid, signal.SIGTERM)
                os.kill(pid, signal.SIGINT)
    assert taken == SIZE


class Random(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        assert get_worker_info() is not None
        return int(torch.randint(1 << 40, ()))


def test_random_transforms_differ_between_epochs_and_not_between_runs() -> None:
    def run() -> list[list[int]]:
        contexts.reset()
        loader = AdaptiveDataLoader(Random(), 2, num_workers=1, seed=5)
        return [[n for batch in loader for n in batch.tolist()] for _ in remaining_epochs_until(2)]

    first = run()
    assert first == run()
    assert first[0] != first[1]


KEEPING = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import pipollux

pipollux.init_process_group("gloo")
model = nn.Sequential(nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = pipollux.HybridParallel(model, optimizer)
data = TensorDataset(torch.randn({samples}, 2))
loader = pipollux.AdaptiveDataLoader(data, 4, num_workers=2, persistent_workers=True)
for _ in pipollux.remaining_epochs_until(2):
    for (inputs,) in loader:
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()
        print("trained", flush=True)
"""


@pytest.mark.parametrize(
    ("launcher", "stops"),
    first_points(1, [("forked", True), ("forked", False), ("python", True), ("python", False)]),
)
def test_a_script_with_persistent_workers_ends(launcher: str, stops: bool, tmp_path: Path) -> None:
    """As multiprocessing waits for them, which pass over a first SIGTERM."""
    script = tmp_path / "keeping.py"
    script.write_text(KEEPING.format(samples=400_000 if stops else 16))
    started = Forked(script) if launcher == "forked" else Command([sys.executable, str(script)])
    with started as program:
        if stops:
            until(lambda: "trained" in program.output, "it trains")
            program.send_signal(signal.SIGTERM)
        assert program.wait(120.0) == (143 if stops else 0)
