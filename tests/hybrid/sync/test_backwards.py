"""Loops whose forwards and backwards are not pairs: gradients are still the plain model's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import (
    AdaptiveDataLoader,
    HybridParallel,
    SynchronizationError,
    init_process_group,
    replica_rank,
)
from pipollux_hybrid.job.context import context
from tests.extent import first, turns
from tests.hybrid.models import assert_close, gradients, make_data, make_model
from tests.hybrid.replicas import run_replicas

CHECKPOINTS = ["always", "except_last", "never"]
ROWS = 8

Model = Callable[[Tensor], Tensor]


def rows(step: int, rank: int | None) -> tuple[Tensor, Tensor]:
    """A batch of the whole, or a replica's half of it."""
    start, stop = step * ROWS, (step + 1) * ROWS
    if rank is not None:
        start, stop = start + rank * ROWS // 2, start + (rank + 1) * ROWS // 2
    inputs, targets = make_data("mlp", 64)[list(range(start, stop))]
    return inputs, targets


def loss_of(model: Model, step: int, rank: int | None) -> Tensor:
    inputs, targets = rows(step, rank)
    return F.cross_entropy(model(inputs), targets)


def one_after_the_other(model: Model, rank: int | None) -> None:
    losses = [loss_of(model, step, rank) for step in range(3)]
    for loss in losses:
        loss.backward()


def last_one_first(model: Model, rank: int | None) -> None:
    losses = [loss_of(model, step, rank) for step in range(2)]
    for loss in reversed(losses):
        loss.backward()


def all_in_one(model: Model, rank: int | None) -> None:
    sum(loss_of(model, step, rank) for step in range(3)).backward()


def some_without_backward(model: Model, rank: int | None) -> None:
    loss = loss_of(model, 0, rank)
    loss_of(model, 1, rank)
    with torch.no_grad():
        loss_of(model, 2, rank)
    loss.backward()
    loss_of(model, 3, rank)


def with_a_term_on_parameters(model: Model, rank: int | None) -> None:
    module = model.module if isinstance(model, HybridParallel) else model
    decay = sum(parameter.square().sum() for parameter in module.parameters())
    (loss_of(model, 0, rank) + 0.1 * decay).backward()


def one_after_asking_for_other_gradients(model: Model, rank: int | None) -> None:
    inputs, targets = rows(0, rank)
    inputs = inputs.clone().requires_grad_()
    slope = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)[0]
    penalty = slope.square().sum(1).mean()
    (F.cross_entropy(model(inputs), targets) + penalty).backward()


def twice_through_one_graph(model: Model, rank: int | None) -> None:
    loss = loss_of(model, 0, rank)
    loss.backward(retain_graph=True)
    loss.backward()


def in_eval_mode(model: Model, rank: int | None) -> None:
    model.eval()
    loss_of(model, 0, rank).backward()
    model.train()


LOOPS = [
    one_after_the_other,
    last_one_first,
    all_in_one,
    some_without_backward,
    with_a_term_on_parameters,
    in_eval_mode,
]
WITHOUT_RECOMPUTATION = [one_after_asking_for_other_gradients, twice_through_one_graph]


def in_pipeline(loop: Callable[..., None], checkpoint: str) -> list[dict[str, Tensor]]:
    init_process_group("gloo")
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = HybridParallel(
        module,
        optimizer,
        num_stages=2,
        num_microbatches=2,
        activation_checkpoint=checkpoint,
        bucket_bytes=500,
    )
    history = []
    for _ in range(3):  # what one step learns about the loop serves the next
        optimizer.zero_grad()
        loop(model, replica_rank() if context().env.num_replicas > 1 else None)
        history.append(gradients(module))
        optimizer.step()
    return history


def check(loop: Callable[..., None], checkpoint: str, num_replicas: int) -> None:
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loop(module, None)
        expected.append(gradients(module))
        optimizer.step()
    for history in run_replicas(in_pipeline, num_replicas, loop, checkpoint):
        for ours, theirs in zip(history, expected, strict=True):
            assert_close(ours, theirs, 1e-12)


@pytest.mark.parametrize(("loop", "checkpoint"), turns(LOOPS, CHECKPOINTS))
def test_two_replicas(loop: Callable[..., None], checkpoint: str) -> None:
    check(loop, checkpoint, 2)


@pytest.mark.parametrize("loop", WITHOUT_RECOMPUTATION)
def test_two_replicas_without_recomputation(loop: Callable[..., None]) -> None:
    check(loop, "never", 2)


@pytest.mark.parametrize("loop", first(1, [one_after_the_other, all_in_one, in_eval_mode]))
def test_one_replica(loop: Callable[..., None]) -> None:
    check(loop, "except_last", 1)


def two_losses(checkpoint: str) -> list[dict[str, Tensor]]:
    """Each pass of the loop body calls backward twice, with accumulation."""
    init_process_group("gloo")
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    loader = AdaptiveDataLoader(make_data("mlp", 21), batch_size=ROWS)
    loader.autoscale_batch_size(ROWS, (1, 2), gradient_accumulation=True)
    model = HybridParallel(
        module, optimizer, num_stages=2, num_microbatches=2, activation_checkpoint=checkpoint
    )
    history = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        if checkpoint == "never":  # asks for gradients of something else in between
            probe = inputs.clone().requires_grad_()
            torch.autograd.grad(model(probe).sum(), probe)
        model(inputs).square().mean().backward()
        micro_step = context().batch.micro_step
        assert micro_step is not None
        if micro_step.is_optimizer_step:
            history.append(gradients(module))
        optimizer.step()
    return history


@pytest.mark.parametrize(("checkpoint", "num_replicas"), turns(["except_last", "never"], [1, 2]))
def test_two_backwards_in_one_pass_of_an_adaptive_loop(checkpoint: str, num_replicas: int) -> None:
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for start in range(0, 21, ROWS):
        inputs, targets = make_data("mlp", 21)[list(range(start, min(start + ROWS, 21)))]
        optimizer.zero_grad()
        output = module(inputs)
        (F.cross_entropy(output, targets) + output.square().mean()).backward()
        expected.append(gradients(module))
        optimizer.step()
    for history in run_replicas(two_losses, num_replicas, checkpoint):
        for ours, theirs in zip(history, expected, strict=True):
            assert_close(ours, theirs, 1e-12)


class Switched(nn.Module):
    """Each of its layers is used in some steps and by some replicas only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.used = [0]

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(self.layers[index](x) for index in self.used)


USED = [  # by step, by replica
    [[0], [0]],
    [[0], [0]],
    [[0, 1], [0]],  # one that was not used in the step before
    [[1], [0, 1]],
    [[2], [2]],
    [[2], [0]],
]


def switch(checkpoint: str) -> list[dict[str, Tensor]]:
    init_process_group("gloo")
    module = switched()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    model = HybridParallel(
        module,
        optimizer,
        balance=[1, 2],
        num_microbatches=2,
        activation_checkpoint=checkpoint,
        bucket_bytes=400,
        check_replicas=True,
    )
    history = []
    for step, used in enumerate(USED):
        module[1].used = used[replica_rank()]
        optimizer.zero_grad()
        loss_of(model, step, replica_rank()).backward()
        history.append(gradients(module))
        optimizer.step()
    return history


def switched() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), Switched(), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("checkpoint", first(1, CHECKPOINTS))
def test_layers_are_used_in_some_steps_only(checkpoint: str) -> None:
    module = switched()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    expected = []
    for step, used in enumerate(USED):
        optimizer.zero_grad()
        for rank in (0, 1):
            module[1].used = used[rank]
            (loss_of(module, step, rank) / 2).backward()
        expected.append(gradients(module))
        optimizer.step()
    for history in run_replicas(switch, 2, checkpoint):
        for ours, theirs in zip(history, expected, strict=True):
            assert_close(ours, theirs, 1e-12)


class Twice(nn.Module):
    """Uses one layer twice, so its gradient has two parts in each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


FROZEN = [[], [0], [0, 1], [2], [1], []]
"""Layers that are frozen in each step."""


def freeze(module: nn.Sequential, step: int) -> None:
    for index, layer in enumerate(module):
        layer.requires_grad_(index not in FROZEN[step])


def tied() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), Twice(), nn.Linear(6, 3)).double()


def thaw(checkpoint: str) -> list[dict[str, Tensor]]:
    init_process_group("gloo")
    module = tied()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    model = HybridParallel(
        module,
        optimizer,
        balance=[1, 2],
        num_microbatches=2,
        activation_checkpoint=checkpoint,
        bucket_bytes=400,
        check_replicas=True,
    )
    history = []
    for step in range(len(FROZEN)):
        freeze(module, step)
        optimizer.zero_grad()
        loss_of(model, step, replica_rank()).backward()
        history.append(gradients(module))
        optimizer.step()
    return history


@pytest.mark.parametrize("checkpoint", first(1, CHECKPOINTS))
def test_layers_freeze_and_thaw_and_one_is_used_twice(checkpoint: str) -> None:
    module = tied()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    expected = []
    for step in range(len(FROZEN)):
        freeze(module, step)
        optimizer.zero_grad()
        loss_of(module, step, None).backward()
        expected.append(gradients(module))
        optimizer.step()
    for history in run_replicas(thaw, 2, checkpoint):
        for ours, theirs in zip(history, expected, strict=True):
            assert_close(ours, theirs, 1e-12)


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(self.fail)
        return x * 1

    def fail(self, _gradient: Tensor) -> None:
        raise ArithmeticError("on purpose")


def fail_and_go_on() -> str:
    init_process_group("gloo")
    module = nn.Sequential(nn.Linear(6, 6), Fails(), nn.Linear(6, 3)).double()
    model = HybridParallel(
        module, torch.optim.SGD(module.parameters(), lr=0.1), activation_checkpoint="never"
    )
    with pytest.raises(ArithmeticError, match="on purpose"):
        loss_of(model, 0, replica_rank()).backward()
    try:
        loss_of(model, 1, replica_rank()).backward()
    except SynchronizationError as error:
        return str(error)
    return "nothing was said"


def test_after_a_backward_that_failed_nothing_is_averaged() -> None:
    for message in run_replicas(fail_and_go_on, 2):
        assert "the backward before this one failed" in message
        assert "checkpoint" in message
