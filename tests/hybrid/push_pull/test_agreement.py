"""Which differences between replicas are refused, and which are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipollux_hybrid.push_pull.agreement import difference, settings_of


class Projection(nn.Module):
    """A layer with a random buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("matrix", torch.randn(8, 8, generator=generator))
        mask = torch.full((4, 4), -torch.inf).triu(1)
        self.register_buffer("mask", mask)


def settings(
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    seed: int = 0,
    steps: int = 0,
    scheduled: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Return the settings of a replica whose schedule has done some steps."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Projection(seed))
    optimizer = make(model.parameters(), **{"lr": 1e-3, **options})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1) if scheduled else None
    for _ in range(steps):
        optimizer.step()
        assert schedule is not None
        schedule.step()
        model[1](torch.randn(4, 2))  # changes its running statistics
    return settings_of(model, optimizer, schedule)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({"lr": 1e-2}, "lr of group 0 is 0.001 there and 0.01 here"),
        ({"weight_decay": 0.1}, "weight_decay of group 0 is 0.01 there and 0.1 here"),
        ({"betas": (0.9, 0.95)}, "betas of group 0 is (0.9, 0.999) there and (0.9, 0.95) here"),
        ({"make": torch.optim.Adam}, "optimizer is AdamW there and Adam here"),
        ({"scheduled": False}, "lr_scheduler is StepLR there and None here"),
        ({"seed": 1}, "buffer 2.matrix differs"),
    ],
    ids=str,
)
def test_differences(other: dict[str, Any], found: str) -> None:
    assert found in difference(settings(), settings(**other))


@pytest.mark.parametrize("other", [{"steps": 3}, {"foreach": True}], ids=str)
def test_changes_of_a_schedule_and_of_running_statistics_are_none(other: dict[str, Any]) -> None:
    assert difference(settings(), settings(**other)) == ""


def test_rounding_and_hyperparameters_of_other_versions_are_none() -> None:
    ours, theirs = settings(), settings()
    theirs["new of group 0"] = "1"
    size, mark = theirs["buffer 2.matrix"]
    theirs["buffer 2.matrix"] = [size * (1 + 1e-6), mark + 1e-6]
    assert difference(theirs, ours) == difference(ours, theirs) == ""


def test_a_momentum_that_a_schedule_cycles_is_none() -> None:
    found = []
    for steps in (0, 3):
        model = nn.Sequential(nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        for _ in range(steps):
            optimizer.step()
            schedule.step()
        found.append(settings_of(model, optimizer, schedule))
    assert difference(*found) == ""
