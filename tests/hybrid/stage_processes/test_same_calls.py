"""The processes of a replica are given the same batches and make the same calls, or say so."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from pipollux_hybrid import (
    AdaptiveDataLoader,
    HybridParallel,
    init_process_group,
    process_rank,
    remaining_epochs_until,
)
from tests.extent import first
from tests.hybrid.models import make_data, make_model
from tests.hybrid.stage_processes.training import run_stages

DATA = make_data("mlp", 32)
Wrapped = tuple[HybridParallel, torch.optim.Optimizer]


def wrapped(schedule: str | None = None) -> Wrapped:
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=2, schedule=schedule)
    return model, optimizer


def train(wrapped: Wrapped, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
    model, optimizer = wrapped
    for inputs, targets in batches:
        optimizer.zero_grad()
        model.train_step(inputs, targets, F.cross_entropy)
        optimizer.step()


class Flipped(Dataset[tuple[Tensor, Tensor]]):
    """Turns samples at random, by Python's own generator."""

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = DATA[index]
        return inputs * random.choice([-1.0, 1.0]), target  # noqa: S311  # no secret


def sampler_of_ranks() -> None:
    loader = DataLoader(DATA, batch_size=8, sampler=DistributedSampler(DATA))
    train(wrapped(), iter(loader))


def sampler_of_ranks_interleaved() -> None:
    loader = DataLoader(DATA, batch_size=8, sampler=DistributedSampler(DATA))
    train(wrapped("interleaved"), iter(loader))


def shards_of_other_sizes() -> None:
    mine = TensorDataset(*DATA[list(range(16 + 3 * process_rank()))])
    train(wrapped(), iter(DataLoader(mine, batch_size=32)))


def seeded_by_rank() -> None:
    model = wrapped()
    torch.manual_seed(process_rank())
    train(model, iter(DataLoader(DATA, batch_size=8, shuffle=True)))


def turned_by_rank() -> None:
    model = wrapped()
    random.seed(process_rank())
    train(model, iter(AdaptiveDataLoader(Flipped(), batch_size=8)))


def targets_by_rank() -> None:
    inputs, targets = DATA.tensors
    train(wrapped(), iter([(inputs, targets.roll(process_rank()))]))


def late_by_rank() -> None:
    """The batches differ after hundreds of steps."""
    inputs, targets = DATA.tensors
    batches = [(inputs[i % 8 : i % 8 + 8], targets[i % 8 : i % 8 + 8]) for i in range(60)]
    model = wrapped()
    train(model, iter(batches))
    train(model, iter([(inputs[8 * process_rank() :][:8], targets[8 * process_rank() :][:8])]))


def evaluated_by_rank() -> None:
    model, _ = wrapped()
    with torch.no_grad():
        model(DATA.tensors[0][process_rank() :][:8])


ANOTHER = "the processes of replica 0 were given different "
BATCHES: dict[str, tuple[Callable[[], None], str]] = {
    "DistributedSampler": (sampler_of_ranks, "inputs, targets"),
    "DistributedSampler, interleaved": (sampler_of_ranks_interleaved, "inputs, targets"),
    "other sizes": (shards_of_other_sizes, "16 samples"),
    "seed": (seeded_by_rank, "inputs, targets"),
    "transforms": (turned_by_rank, "inputs"),
    "targets": (targets_by_rank, "targets"),
    "late": (late_by_rank, "inputs, targets"),
    "evaluation": (evaluated_by_rank, "inputs"),
}


def said(function: Callable[[], None]) -> str:
    init_process_group("gloo", timeout=60.0)
    try:
        function()
    except Exception as error:  # which is told to the test
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("name", first(3, list(BATCHES)))
def test_other_batches_are_refused_before_the_first_step(name: str) -> None:
    function, differ = BATCHES[name]
    ((first, second),) = run_stages(said, 1, 2, function)
    for text in (first, second):
        assert text.startswith(f"SynchronizationError: {ANOTHER}"), text
        assert differ in text
        assert "pipollux.replica_rank()" in text


def saves_on_one_and_ends() -> None:
    model, _ = wrapped()
    if process_rank() == 0:
        model.state_dict()


def saves_on_one_and_trains() -> None:
    model, optimizer = wrapped()
    if process_rank() == 0:
        model.state_dict()
    train((model, optimizer), iter([DATA.tensors]))


def trains_where_another_saves() -> None:
    model, optimizer = wrapped()
    if process_rank() == 1:
        model.state_dict()
    train((model, optimizer), iter([DATA.tensors]))


def evaluates_on_one_and_trains() -> None:
    model, optimizer = wrapped()
    if process_rank() == 0:
        with torch.no_grad():
            model(DATA.tensors[0])
    train((model, optimizer), iter([DATA.tensors]))


def evaluates_on_one_and_ends_an_epoch() -> None:
    model, _ = wrapped()
    for _ in remaining_epochs_until(2):
        if process_rank() == 0:
            with torch.no_grad():
                model(DATA.tensors[0])


def evaluates_on_one_and_ends() -> None:
    model, _ = wrapped()
    if process_rank() == 0:
        with torch.no_grad():
            model(DATA.tensors[0])


def clips_on_one() -> None:
    model, optimizer = wrapped()
    model.train_step(*DATA.tensors, F.cross_entropy)
    if process_rank() == 1:
        model.clip_grad_norm_(1.0)
    train((model, optimizer), iter([DATA.tensors]))


STATE, STEP, FORWARD = (
    "model.state_dict()",
    "model.train_step(…)",
    "model(inputs) under torch.no_grad()",
)
CALLS: dict[str, tuple[Callable[[], None], str, str]] = {
    "save and train": (saves_on_one_and_trains, STATE, STEP),
    "train and save": (trains_where_another_saves, STEP, STATE),
    "evaluate and train": (evaluates_on_one_and_trains, FORWARD, STEP),
    "evaluate and go on": (
        evaluates_on_one_and_ends_an_epoch,
        FORWARD,
        "a step boundary, the beginning of epoch 1",
    ),
    "clip": (clips_on_one, STEP, "model.clip_grad_norm_(…)"),
}


@pytest.mark.parametrize("name", first(2, list(CALLS)))
def test_other_calls_are_refused_and_named(name: str) -> None:
    function, first, second = CALLS[name]
    (texts,) = run_stages(said, 1, 2, function)
    for text in texts:
        told = f"SynchronizationError: rank 0 is in {first}, and rank 1 is in {second}: "
        assert text.startswith(told), text
        assert "make these in every process" in text


@pytest.mark.parametrize("function", first(1, [saves_on_one_and_ends, evaluates_on_one_and_ends]))
def test_a_process_that_has_ended_is_missed_in_a_call(function: Callable[[], None]) -> None:
    ((first, second),) = run_stages(said, 1, 2, function)
    call = STATE if function is saves_on_one_and_ends else FORWARD
    assert f"in {call}, which every process of the replica must call" in first
    assert "rank 1" in first
    assert second == "nothing"
