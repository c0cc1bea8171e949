"""What a void step may have changed, put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from pipollux_hybrid import HybridParallel, init_process_group, register_for_checkpointing
from pipollux_hybrid.checkpoint.model_state import STATE_NAME
from pipollux_hybrid.checkpoint.remembering import REMEMBERED_BYTES
from pipollux_hybrid.checkpoint.rng_state import random_state
from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.elastic.process_group import destroy_process_group
from pipollux_hybrid.errors import CheckpointError
from pipollux_hybrid.job import context as contexts


class Seen(nn.Module):
    """Counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1 if float(self.count) % 2 else self.count.add_(1)
        return x


class Kept:
    """An object with a state."""

    def __init__(self, size: int) -> None:
        self.value = torch.zeros(size)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    init_process_group("gloo")
    yield
    destroy_process_group()


def make_model(*layers: nn.Module) -> tuple[nn.Sequential, torch.optim.Optimizer, Any]:
    module = nn.Sequential(nn.Linear(2, 2), *layers)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return module, HybridParallel(module, optimizer, lr_scheduler=schedule), schedule


def state(name: str) -> Any:
    return contexts.context().component(States)[name]


def test_buffers_rates_and_the_schedule_are_put_back() -> None:
    module, model, schedule = make_model(Seen())
    (group,) = schedule.optimizer.param_groups
    for step in range(4):
        put_back = state(STATE_NAME).remember()
        count, rate, epoch = float(module[1].count), group["lr"], schedule.last_epoch
        model(torch.ones(1, 2))
        if step:  # torch warns of a schedule that is stepped before the optimizer
            schedule.step()
            assert group["lr"] != rate
        assert float(module[1].count) != count
        put_back()
        assert (float(module[1].count), group["lr"], schedule.last_epoch) == (count, rate, epoch)
        model(torch.ones(1, 2)).sum().backward()
        schedule.optimizer.step()


@pytest.mark.parametrize("size", [1, REMEMBERED_BYTES])
def test_of_buffers_that_do_not_change_the_small_ones_are_kept(size: int) -> None:
    """A mask that no forward changes is not held twice; a small one may yet change."""
    layer = nn.Linear(2, 2)
    layer.register_buffer("mask", torch.zeros(size))
    make_model(layer)
    for _ in range(2):
        put_back = state(STATE_NAME).remember()
    layer.mask.add_(1.0)
    if size > 1:
        with pytest.raises(CheckpointError, match="buffer 'mask' of a Linear has changed"):
            put_back()
    else:
        put_back()
        assert not layer.mask.any()


def test_changed_parameters_are_refused() -> None:
    module, _, _ = make_model()
    put_back = state(STATE_NAME).remember()
    put_back()
    with torch.no_grad():
        module[0].weight.clamp_(-1.0, 1.0)
    with pytest.raises(CheckpointError, match="changed parameters in the step that is void"):
        put_back()


def test_small_objects_are_copied_and_large_ones_refused() -> None:
    small = register_for_checkpointing("small", Kept(4))
    register_for_checkpointing("large", Kept(REMEMBERED_BYTES))
    put_back = state("small.pt").remember()
    small.value += 1.0
    put_back()
    assert small.value.tolist() == [0.0] * 4
    with pytest.raises(CheckpointError, match=r"large\.pt is too large to be copied"):
        state("large.pt").remember()()


def test_an_average_leaves_void_steps_out() -> None:
    losses = contexts.context().control.losses
    losses.expected = True
    module = nn.Linear(2, 2)
    average = register_for_checkpointing("average", AveragedModel(module))
    average.update_parameters(module)
    losses.void = True
    average.update_parameters(module)
    assert int(average.n_averaged) == 1
    losses.clear()
    average.update_parameters(module)
    assert int(average.n_averaged) == 2


def test_random_numbers_are_put_back_and_compared() -> None:
    generators = random_state(contexts.context())

    def draw() -> tuple[float, ...]:
        return (
            float(torch.randn(())),
            random.gauss(0, 1),
            float(np.random.randn()),
        )  # the generator scripts use

    draw()
    put_back = generators.remember()
    marks = generators.marks()
    first = draw()
    put_back()
    generators.remember()
    assert generators.marks() == marks
    assert draw() == first
    generators.remember()
    assert all(a != b for a, b in zip(generators.marks(), marks, strict=True))
