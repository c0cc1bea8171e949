"""Training loops as people write them: several loaders, `break`, worker processes, evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from pipollux_hybrid import (
    AdaptiveDataLoader,
    HybridParallel,
    current_epoch,
    init_process_group,
    remaining_epochs_until,
    save_all_states,
)
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.hybrid.replicas import run_replicas

SIZE = 20


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


def numbers(size: int = SIZE) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def taken(loader: AdaptiveDataLoader[object], most: int | None = None) -> list[int]:
    """What the loader gives, up to so many batches."""
    found: list[int] = []
    for number, (batch,) in enumerate(loader):
        found += batch.tolist()
        if number + 1 == most:
            break
    return found


def test_break_ends_the_loop_and_the_next_epoch_begins_anew() -> None:
    loader = AdaptiveDataLoader(numbers(), batch_size=4)
    assert taken(loader, most=2) == list(range(8))
    assert context().batch.micro_step is None
    assert taken(loader) == list(range(SIZE))


def test_loops_of_an_epoch_that_were_done_are_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loops an epoch; the job stops in the second one of epoch 1, and goes on right there."""
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_DIR", str(tmp_path))
    contexts.reset()

    def loops(stop_at: tuple[int, int] | None) -> list[tuple[int, str, list[int]]]:
        training = AdaptiveDataLoader(numbers(), batch_size=5)
        evaluation = AdaptiveDataLoader(numbers(8), batch_size=2)
        told = []
        for epoch in remaining_epochs_until(3):
            assert current_epoch() == epoch
            told.append((epoch, "training", taken(training)))
            found: list[int] = []
            for number, (batch,) in enumerate(evaluation):
                if (epoch, number) == stop_at:
                    save_all_states()
                    return told
                found += batch.tolist()
            told.append((epoch, "evaluation", found))
        return told

    before = loops(stop_at=(1, 2))
    contexts.reset()
    after = loops(stop_at=None)
    assert before[-1] == (1, "training", list(range(SIZE)))
    assert after[:2] == [(1, "training", []), (1, "evaluation", [4, 5, 6, 7])]
    assert after[2:] == [
        (2, "training", list(range(SIZE))),
        (2, "evaluation", list(range(8))),
    ]


def with_workers(num_workers: int) -> list[int]:
    init_process_group("gloo")
    loader = AdaptiveDataLoader(
        numbers(), batch_size=6, shuffle=True, seed=3, num_workers=num_workers
    )
    return [*taken(loader), *taken(loader)]


def test_worker_processes_give_the_same_batches() -> None:
    alone, helped = (run_replicas(with_workers, 2, workers) for workers in (0, 1))
    assert alone == helped
    both = alone[0] + alone[1]
    assert sorted(both) == sorted([*range(SIZE), *range(SIZE)])


def zero_grad_where_you_like(order: str) -> list[float]:
    """Train with accumulation, clearing gradients at different places of the loop body."""
    init_process_group()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(24, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(2, (24,), generator=generator)
    loader = AdaptiveDataLoader(TensorDataset(inputs, targets), batch_size=8)
    loader.autoscale_batch_size(8, (1, 3), gradient_accumulation=True)
    model = HybridParallel(module, optimizer, num_microbatches=2)
    for x, y in loader:
        if order == "first":
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if order == "before backward":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if order == "last":
            optimizer.zero_grad()
    return [p.sum().item() for p in module.parameters()]


def test_zero_grad_may_stand_where_people_put_it() -> None:
    first, before, last = (
        run_replicas(zero_grad_where_you_like, 1, order)[0]
        for order in ("first", "before backward", "last")
    )
    assert first == before == last


def evaluate_in_between() -> tuple[int, int]:
    """Evaluation with the same model leaves steps and gradients alone."""
    init_process_group("gloo")
    module = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(12, 1), torch.randn(12, 1))
    training, evaluation = (AdaptiveDataLoader(data, batch_size=4) for _ in range(2))
    model = HybridParallel(module, optimizer, num_stages=2)
    for _ in remaining_epochs_until(2):
        model.train()
        for x, y in training:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for x, _ in evaluation:
                model(x)
    return context().component(Metrics).step, context().component(Metrics).samples


def test_evaluation_counts_no_steps() -> None:
    assert run_replicas(evaluate_in_between, 2) == [(6, 24), (6, 24)]


def test_a_loader_tells_how_it_cuts_a_batch() -> None:
    loader = AdaptiveDataLoader(numbers(), batch_size=10)
    loader.autoscale_batch_size(32, (1, 4), gradient_accumulation=True)
    assert loader.current_batch_size == 10
    assert (loader.current_local_bsz, loader.accumulation_steps) == (4, 2)
    assert len(loader) == 6, "two iterations of three parts"
    sizes = []
    for (batch,) in loader:
        sizes.append(len(batch))
        assert loader.current_index == 10 * ((len(sizes) - 1) // 3), "whole iterations count"
    assert sizes == [4, 3, 3, 4, 3, 3]
