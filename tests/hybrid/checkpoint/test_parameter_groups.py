"""Layers that are unfrozen along the way, and schedules, through restarts of the script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import (
    AdaptiveDataLoader,
    CheckpointError,
    HybridParallel,
    remaining_epochs_until,
    save_all_states,
)
from pipollux_hybrid.job import context as contexts
from tests.hybrid.models import make_data, make_model

EPOCHS, UNFREEZES = 4, 2
BATCHES = 3
Unfreeze = Callable[[int, nn.Sequential, torch.optim.Optimizer], None]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_DIR", str(tmp_path))
    contexts.reset()
    yield tmp_path
    contexts.reset()


class Killed(Exception):  # noqa: N818  # it is no error
    """The job ends here, right after a checkpoint."""


def run(
    unfreeze: Unfreeze, killed_at: tuple[int, int] | None = None, *, to_none: bool = True
) -> nn.Sequential:
    """A fine-tuning script: the first four layers are frozen at first.

    Args:
        unfreeze: Called at the top of each epoch.
        killed_at: Epoch and batch of it before which the job ends.
        to_none: Whether `zero_grad` removes gradients, so that the optimizer leaves frozen
            parameters alone.
    """
    contexts.reset()
    module = make_model("mlp")
    module[:4].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01)
    loader = AdaptiveDataLoader(make_data("mlp", 4 * BATCHES), batch_size=4, shuffle=True)
    model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=2)
    for epoch in remaining_epochs_until(EPOCHS):
        unfreeze(epoch, module, optimizer)
        for batch, (inputs, targets) in enumerate(loader):
            if killed_at == (epoch, batch):
                save_all_states()
                raise Killed
            optimizer.zero_grad(set_to_none=to_none)
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return module


def add(module: nn.Sequential, optimizer: torch.optim.Optimizer, layer: int, lr: float) -> None:
    module[layer].requires_grad_(True)
    optimizer.add_param_group({"params": module[layer].parameters(), "lr": lr})


def once(epoch: int, module: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """Layer by layer, each when its epoch begins."""
    if epoch == UNFREEZES:
        add(module, optimizer, 2, 0.003)
    if epoch == UNFREEZES + 1:
        add(module, optimizer, 0, 0.001)


def as_needed(epoch: int, module: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """As a careful user writes it, who looks at what there is."""
    if epoch >= UNFREEZES and len(optimizer.param_groups) == 1:
        add(module, optimizer, 2, 0.003)
        add(module, optimizer, 0, 0.001)


def without_groups(epoch: int, module: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """One layer is frozen later on; the optimizer's groups stay as they are."""
    if epoch == UNFREEZES:
        module[8].requires_grad_(False)


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("unfreeze", "killed_at"),
    [
        pytest.param(once, (UNFREEZES - 1, 1), marks=pytest.mark.exhaustive),
        (once, (UNFREEZES, 2)),
        pytest.param(once, (UNFREEZES + 1, 1), marks=pytest.mark.exhaustive),
        (as_needed, (UNFREEZES, 1)),
        pytest.param(as_needed, (UNFREEZES + 1, 0), marks=pytest.mark.exhaustive),
        pytest.param(without_groups, (UNFREEZES + 1, 2), marks=pytest.mark.exhaustive),
    ],
)
def test_unfreezing_goes_on_as_if_nothing_had_stopped_it(
    unfreeze: Unfreeze, killed_at: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.delenv("PIPOLLUX_CHECKPOINT_DIR")
        expected = run(unfreeze)
    learned = not torch.equal(make_model("mlp")[2].weight, expected[2].weight)
    assert learned == (unfreeze is not without_groups)
    with pytest.raises(Killed):
        run(unfreeze, killed_at)
    resumed = run(unfreeze)
    assert [p.requires_grad for p in resumed.parameters()] == [
        p.requires_grad for p in expected.parameters()
    ]
    for name, tensor in parameters(expected).items():
        torch.testing.assert_close(parameters(resumed)[name], tensor, rtol=0, atol=0)


def test_frozen_parameters_with_zeros_as_gradients_go_on_moving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as without:
        without.delenv("PIPOLLUX_CHECKPOINT_DIR")
        expected, other = run(without_groups, to_none=False), run(without_groups)
    assert not torch.equal(expected[8].weight, other[8].weight), "it moves by its momentum"
    with pytest.raises(Killed):
        run(without_groups, (UNFREEZES + 1, 1), to_none=False)
    resumed = run(without_groups, to_none=False)
    for name, tensor in parameters(expected).items():
        torch.testing.assert_close(parameters(resumed)[name], tensor, rtol=0, atol=0)


def test_a_group_that_the_checkpoint_has_brought_is_added_once() -> None:
    with pytest.raises(Killed):
        run(once, (UNFREEZES, 1))
    contexts.reset()
    module = make_model("mlp")
    optimizer = torch.optim.AdamW(module[4:].parameters(), lr=0.01)
    HybridParallel(module, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.003]
    optimizer.add_param_group({"params": list(module[2].parameters()), "lr": 5.0})
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.003], "it was there"
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": module[2].weight})
    optimizer.add_param_group({"params": module[0].weight})
    assert len(optimizer.param_groups) == 3


def test_a_group_of_named_parameters() -> None:
    for adds in (True, False):
        contexts.reset()
        module = make_model("mlp")
        optimizer = torch.optim.SGD(module[4:].named_parameters(), lr=0.1)
        HybridParallel(module, optimizer)
        if adds:
            optimizer.add_param_group({"params": module[2].named_parameters(), "lr": 0.5})
        save_all_states()
    assert optimizer.param_groups[1]["param_names"] == ["weight", "bias"]
    optimizer.add_param_group({"params": module[2].named_parameters(), "lr": 5.0})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]


def schedule(kind: str, optimizer: torch.optim.Optimizer) -> Any:
    lr = torch.optim.lr_scheduler
    step, cosine = lr.StepLR(optimizer, 2), lr.CosineAnnealingLR(optimizer, 4)
    if kind == "step":
        return step
    if kind == "cosine":
        return cosine
    second = step if kind == "warm-up, step" else cosine
    return lr.SequentialLR(optimizer, [lr.ConstantLR(optimizer), second], [2])


def save_with(kind: str) -> None:
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    HybridParallel(module, optimizer, lr_scheduler=schedule(kind, optimizer))
    save_all_states()
    contexts.reset()


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (
            "step",
            "cosine",
            r"its lr_scheduler is StepLR and the script's is CosineAnnealingLR: use",
        ),
        (
            "warm-up, step",
            "warm-up, cosine",
            r"is SequentialLR\(ConstantLR, StepLR\) and the script's is "
            r"SequentialLR\(ConstantLR, CosineAnnealingLR\)",
        ),
    ],
)
def test_a_checkpoint_of_another_schedule(before: str, after: str, sentence: str) -> None:
    save_with(before)
    save_with(before)  # the same one goes on
    with pytest.raises(CheckpointError, match=sentence):
        save_with(after)
