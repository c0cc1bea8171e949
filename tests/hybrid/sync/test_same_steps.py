"""All replicas take a step, with the same hyperparameters, or none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from pipollux_hybrid import (
    AdaptiveDataLoader,
    HybridParallel,
    SynchronizationError,
    init_process_group,
    process_rank,
    replica_rank,
    save_all_states,
)
from pipollux_hybrid.job.context import context
from tests.extent import first, first_points
from tests.hybrid.models import gradients, make_data, make_model, state_of
from tests.hybrid.replicas import run_replicas
from tests.hybrid.stage_processes.training import run_stages

DATA = make_data("mlp", 48)
BROKEN = 19
"""A sample whose loss is not a number; of the second batch of 16."""


def wrapped(**options: Any) -> tuple[HybridParallel, torch.optim.Optimizer, nn.Sequential]:
    init_process_group("gloo", timeout=60.0)
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return HybridParallel(module, optimizer, num_stages=2, **options), optimizer, module


def mine(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = DATA.tensors
    first = (16 * step + 8 * replica_rank()) % 48
    return inputs[first : first + 8], targets[first : first + 8]


def broken() -> TensorDataset:
    inputs, targets = DATA.tensors
    inputs = inputs.clone()
    inputs[BROKEN] = torch.nan
    return TensorDataset(inputs, targets)


def skip_alike(accumulates: bool) -> tuple[list[bool], list[dict[str, Tensor]], dict[str, Tensor]]:
    """A script that leaves out steps on losses that are not finite."""
    init_process_group("gloo", timeout=60.0)
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    loader = AdaptiveDataLoader(broken(), batch_size=16)
    if accumulates:
        loader.autoscale_batch_size(16, (1, 4), gradient_accumulation=True)
    model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=2)
    finite, seen = [], []
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = model.train_step(inputs, targets, F.cross_entropy)
        micro_step = context().batch.micro_step
        if micro_step is not None and micro_step.is_optimizer_step:
            finite.append(bool(torch.isfinite(loss)))
            seen.append(gradients(module))
        if torch.isfinite(loss):
            optimizer.step()
    return finite, seen, state_of(module)


def plain() -> dict[str, Tensor]:
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = broken().tensors
    for batch in range(0, len(inputs), 16):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(inputs[batch : batch + 16]), targets[batch : batch + 16])
        loss.backward()
        if torch.isfinite(loss):
            optimizer.step()
    return state_of(module)


@pytest.mark.parametrize(
    ("num_replicas", "num_stages", "accumulates"),
    first_points(
        2,
        [
            *((2, 1, True), (1, 2, False), (1, 1, False), (1, 1, True)),
            *((2, 1, False), (1, 2, True), (2, 2, False), (2, 2, True)),
        ],
    ),
)
def test_a_step_that_is_not_finite_is_left_out_by_all(
    num_replicas: int, num_stages: int, accumulates: bool
) -> None:
    expected = plain()
    for replica in run_stages(skip_alike, num_replicas, num_stages, accumulates):
        for finite, _, state in replica:
            assert finite == [True, False, True]
            for name, value in state.items():
                torch.testing.assert_close(value, expected[name], rtol=0.0, atol=1e-12)


def skips_one(where: str) -> None:
    model, optimizer, _ = wrapped(check_replicas=where == "compared")
    for step in range(-1 if where == "later" else 0, 3):
        optimizer.zero_grad()
        inputs, targets = mine(step)
        if context().mesh is None:
            F.cross_entropy(model(inputs), targets).backward()
        else:
            model.train_step(inputs, targets, F.cross_entropy)
        if step != 0 or process_rank() != 1:
            optimizer.step()
        if step == 0 and where == "before a checkpoint":
            save_all_states()


def schedules_alone() -> None:
    model, optimizer, _ = wrapped()
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for step in range(3):
        optimizer.zero_grad()
        loss = model.train_step(*mine(step), F.cross_entropy)
        optimizer.step()
        # On the first replica it falls, on the other one it grows.
        scheduler.step(float(loss) * 0 + (1.0 if replica_rank() else -1.0) * step)


def warms_up_alone() -> None:
    model, optimizer, _ = wrapped()
    for step in range(3):
        optimizer.zero_grad()
        model.train_step(*mine(step), F.cross_entropy)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1 + process_rank())
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 0.1


def said(function: Callable[..., None], *args: Any) -> str:
    try:
        function(*args)
    except SynchronizationError as error:
        return str(error)
    return "nothing"


STEPS = "optimizer.step() did not run on all"


@pytest.mark.parametrize("where", first(2, ["later", "compared", "first", "before a checkpoint"]))
def test_a_step_of_some_replicas_is_refused(where: str) -> None:
    for text in run_replicas(said, 2, skips_one, where):
        assert text.startswith(STEPS), text
        first = 2 if where == "later" else 1
        assert f"{first} on replica 0, and {first - 1} on replica 1" in text


def test_a_step_of_some_stages_is_refused() -> None:
    for text in run_replicas(
        said, 2, skips_one, "later", environment={"PIPOLLUX_PROCESSES_PER_REPLICA": "2"}
    ):
        assert text.startswith(STEPS), text
        assert "2 on rank 0, and 1 on rank 1" in text


@pytest.mark.parametrize("processes", first(1, ["2", "1"]))
def test_other_learning_rates_are_refused(processes: str) -> None:
    environment = {"PIPOLLUX_PROCESSES_PER_REPLICA": processes}
    for text in run_replicas(said, 4, schedules_alone, environment=environment):
        word = "replica" if processes == "1" else "rank"
        assert f"the optimizers of the {word}s differ: lr of group 0 is 0.1 on {word}" in text
        assert "and 0.05 on" in text
        assert "Accumulator" in text


def test_other_learning_rates_of_a_step_are_refused() -> None:
    for text in run_replicas(said, 2, warms_up_alone):
        assert "lr of group 0 is 0.1 on replica 0, and 0.2 on replica 1" in text
