"""The patched optimizer: steps once an iteration, at the scaled learning rate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipollux_hybrid import AdamScale, AdaScale, ConfigurationError, LinearScale, SquareRootScale
from pipollux_hybrid.optim.adaptive_optimizer import AdaptiveOptimizer
from pipollux_hybrid.optim.scaling_rules import ScalingRule, ScalingState, default_rule


class Loop:
    """An optimizer over one parameter, with its switches in the open."""

    def __init__(self, factor: float = 1.0, **options: float) -> None:
        self.complete = True
        self.steps = 0
        self.parameter = nn.Parameter(torch.tensor([1.0]))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.5, **options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.1)
        self.adaptive = AdaptiveOptimizer(
            self.optimizer,
            is_complete=lambda: self.complete,
            factor=lambda: factor,
            on_step=self.count,
        )

    def count(self) -> None:
        self.steps += 1


def test_steps_only_when_complete_and_keeps_gradients_until_then() -> None:
    loop = Loop()
    loop.parameter.grad = torch.tensor([1.0])
    loop.complete = False
    loop.adaptive.keep_gradients()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    assert loop.parameter.item() == 1.0
    assert loop.parameter.grad is not None
    loop.complete = True
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    assert loop.parameter.item() == 0.5
    assert loop.parameter.grad is None
    assert loop.steps == 1


def test_learning_rate_is_scaled_for_the_step_alone() -> None:
    loop = Loop(factor=1.5)
    loop.parameter.grad = torch.tensor([1.0])
    loop.optimizer.step()
    assert loop.parameter.item() == pytest.approx(1.0 - 0.5 * 1.5)
    assert loop.optimizer.param_groups[0]["lr"] == 0.5


def test_learning_rate_schedulers_go_on_without_a_warning() -> None:
    loop = Loop()
    loop.parameter.grad = torch.tensor([1.0])
    loop.optimizer.step()
    loop.scheduler.step()  # warnings are errors
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_closures_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="more than once an iteration"):
        Loop().optimizer.step(lambda: torch.tensor(0.0))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(AdaScale(), 3.0), (AdamScale(), 3.0**0.5), (LinearScale(), 4.0), (SquareRootScale(), 2.0)],
)
def test_rules(rule: ScalingRule, expected: float) -> None:
    assert rule.factor(ScalingState(scale=4.0, gain=3.0)) == pytest.approx(expected)
    assert rule.factor(ScalingState(scale=1.0, gain=1.0)) == 1.0


def test_default_rule_follows_the_optimizer() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    assert isinstance(default_rule(torch.optim.SGD(parameters, lr=1.0)), AdaScale)
    assert isinstance(default_rule(torch.optim.AdamW(parameters)), AdamScale)
