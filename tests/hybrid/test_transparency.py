"""Gradients and parameters are the plain model's on the whole batch, whatever the parallelism."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipollux_hybrid import AdaptiveDataLoader, HybridParallel, init_process_group
from pipollux_hybrid.context import context
from tests.hybrid.models import (
    MODELS,
    assert_close,
    gradients,
    make_data,
    make_model,
    plain_training,
)
from tests.hybrid.replicas import run_replicas

BATCH_SIZE = 8


def train(
    name: str,
    size: int,
    num_stages: int,
    num_microbatches: int,
    checkpoint: str,
    max_local_bsz: int,
    adam: bool,
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """One epoch in a pipeline; the gradients of every optimizer step, and the final parameters."""
    init_process_group("gloo")
    module = make_model(name)
    optimizer = optimizer_for(module, adam)
    data = make_data(name, size)
    loader = AdaptiveDataLoader(data, batch_size=BATCH_SIZE, shuffle=False)
    loader.autoscale_batch_size(BATCH_SIZE, (1, max_local_bsz), gradient_accumulation=True)
    model = HybridParallel(
        module,
        optimizer,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        checkpoint=checkpoint,
    )
    history = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        micro_step = context().micro_step
        assert micro_step is not None
        if micro_step.is_optimizer_step:
            history.append(gradients(module))
        optimizer.step()
    return history, dict(module.state_dict())


def optimizer_for(module: torch.nn.Module, adam: bool) -> torch.optim.Optimizer:
    if adam:
        return torch.optim.AdamW(module.parameters(), lr=1e-2)
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def plain(name: str, size: int, adam: bool) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    module = make_model(name)
    batches = [range(i, min(i + BATCH_SIZE, size)) for i in range(0, size, BATCH_SIZE)]
    history = plain_training(module, optimizer_for(module, adam), make_data(name, size), batches)
    return history, dict(module.state_dict())


def check(name: str, size: int, num_replicas: int, *arguments: object, adam: bool = False) -> None:
    expected_gradients, expected_parameters = plain(name, size, adam)
    for history, parameters in run_replicas(train, num_replicas, name, size, *arguments, adam):
        assert len(history) == len(expected_gradients)
        for ours, theirs in zip(history, expected_gradients, strict=True):
            assert_close(ours, theirs, 1e-12)
        assert_close(parameters, expected_parameters, 1e-11)


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("size", [22, 17], ids=["short last batch", "last batch of one sample"])
def test_two_replicas_of_two_stages_with_accumulation(
    name: str, checkpoint: str, size: int
) -> None:
    check(name, size, 2, 2, 2, checkpoint, 2)


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "max_local_bsz"), [(1, 1, 8), (3, 8, 8), (4, 3, 3)]
)
def test_one_replica(
    num_stages: int, num_microbatches: int, max_local_bsz: int, checkpoint: str
) -> None:
    check("mlp", 21, 1, num_stages, num_microbatches, checkpoint, max_local_bsz)


def test_three_replicas_that_do_not_divide_the_batch() -> None:
    check("mlp", 24, 3, 2, 2, "except_last", 3)


def test_adam_over_two_replicas() -> None:
    check("transformer", 24, 2, 2, 2, "except_last", 4, adam=True)
