"""Learning rates as they reach the parameters: rules, schedulers, accumulation, restarts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from pipollux_hybrid import (
    AdamScale,
    AdaptiveDataLoader,
    AdaScale,
    ConfigurationError,
    HybridParallel,
    LEGWScale,
    LinearScale,
    ScalingRule,
    ScalingState,
    SquareRootScale,
    init_process_group,
    remaining_epochs_until,
)
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.extent import first
from tests.hybrid.models import assert_close, make_data, make_model
from tests.hybrid.replicas import run_replicas

SIZE, BATCH, EPOCHS = 48, 4, 2
Schedule = Callable[[torch.optim.Optimizer], Any]


def train(
    rule: ScalingRule | None,
    schedule: Schedule | None,
    *,
    when: str = "before",
    every: str = "step",
    smallest: int = BATCH,
    largest: int = SIZE,
    momentum: float = 0.0,
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Two epochs; the parameters, the rate in param_groups after each loop body, and the gains."""
    init_process_group("gloo")
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=momentum)
    scheduler = schedule(optimizer) if schedule and when == "before" else None
    loader = AdaptiveDataLoader(make_data("mlp", SIZE), batch_size=BATCH)
    loader.autoscale_batch_size(SIZE, (smallest, largest), gradient_accumulation=True)
    model = HybridParallel(
        module, optimizer, num_microbatches=2, scaling_rule=rule, lr_scheduler=scheduler
    )
    if schedule and when == "after":
        scheduler = schedule(optimizer)
    rates, gains = [], []
    for _ in remaining_epochs_until(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            if model._complete:
                gains.append(model.gain)
            optimizer.step()
            if scheduler is not None and every == "step":
                scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        if isinstance(scheduler, schedulers.ReduceLROnPlateau):
            scheduler.step(1.0)
            scheduler.step(1.0)  # no better than the first: the rate is halved
        elif scheduler is not None and every == "epoch":
            scheduler.step()
    return dict(module.state_dict()), rates, gains


def plain(
    batch: int, rates: list[float], momentum: float = 0.0
) -> tuple[dict[str, Tensor], nn.Sequential]:
    """The same without Pipollux, at given rates."""
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=momentum)
    data = make_data("mlp", SIZE)
    for number, rate in enumerate(rates):
        start = number * batch % SIZE
        inputs, targets = data[list(range(start, start + batch))]
        optimizer.zero_grad()
        F.cross_entropy(module(inputs), targets).backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return dict(module.state_dict()), module


@pytest.mark.parametrize(
    "rule", [AdaScale(), AdamScale(), LinearScale(), SquareRootScale(), LEGWScale(1.5, SIZE)]
)
@pytest.mark.parametrize("momentum", first(1, [0.0, 0.9]))
def test_updates_are_those_of_the_scaled_rate(rule: ScalingRule, momentum: float) -> None:
    """A batch of 12, three times the initial one, in 2 epochs: 8 steps."""
    options = {"smallest": 12, "momentum": momentum}
    state, rates, gains = run_replicas(_train_with, 1, rule, None, options)[0]
    assert len(gains) == 8
    assert all(1.0 < gain < 3.0 for gain in gains)
    progress, expected = 0.0, []
    for gain in gains:
        now = ScalingState(scale=3.0, gain=gain, progress=progress, init_batch_size=BATCH)
        factor = {
            AdaScale: gain,
            AdamScale: math.sqrt(gain),
            LinearScale: 3.0,
            SquareRootScale: math.sqrt(3.0),
            LEGWScale: math.sqrt(3.0) * min(1.0, (progress + gain) / 54),
        }[type(rule)]
        assert rule.factor(now) == pytest.approx(factor)
        expected.append(0.2 * factor)
        progress += gain
    assert rates == [0.2] * 8, "scripts and schedulers see the unscaled rate"
    assert_close(state, plain(12, expected, momentum)[0], 1e-9)


def _train_with(
    rule: ScalingRule | None, schedule: Schedule | None, options: dict[str, Any]
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    return train(rule, schedule, **options)


def lambda_lr(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.LambdaLR(optimizer, lambda n: 1 / (1 + n))


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.OneCycleLR(optimizer, max_lr=0.4, total_steps=8, cycle_momentum=False)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.CosineAnnealingLR(optimizer, T_max=8)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.99)


def by_hand(schedule: Schedule, num_steps: int) -> list[float]:
    """The rate before each step, from torch's own scheduler on its own."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.2)
    scheduler, rates = schedule(optimizer), []
    for _ in range(num_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("when", first(1, ["before", "after"]))
@pytest.mark.parametrize("schedule", [lambda_lr, one_cycle, cosine])
def test_schedulers_that_step_with_the_optimizer(schedule: Schedule, when: str) -> None:
    options = {"smallest": 12, "when": when}
    state, _, _ = run_replicas(_train_with, 1, LinearScale(), schedule, options)[0]
    expected = [3.0 * rate for rate in by_hand(schedule, 8)]
    assert_close(state, plain(12, expected)[0], 1e-9)


@pytest.mark.parametrize("schedule", [lambda_lr, one_cycle, cosine])
def test_a_scheduler_stands_still_on_accumulation_steps(schedule: Schedule) -> None:
    """12 samples as two accumulation steps of 4 and an optimizer step of 4."""
    options = {"smallest": 4, "largest": 4}
    run = run_replicas(_accumulated, 1, schedule, options)[0]
    assert_close(run, plain(12, by_hand(schedule, 8))[0], 1e-9)


def _accumulated(schedule: Schedule, options: dict[str, Any]) -> dict[str, Tensor]:
    global BATCH
    BATCH = 12  # in this process alone
    state, rates, _ = train(LinearScale(), schedule, **options)
    assert len(rates) == 24
    return state


@pytest.mark.parametrize("when", first(1, ["before", "after"]))
@pytest.mark.parametrize("schedule", [lambda_lr, plateau])
def test_schedulers_that_step_with_the_epoch(schedule: Schedule, when: str) -> None:
    options = {"smallest": 12, "when": when, "every": "epoch"}
    state, rates, _ = run_replicas(_train_with, 1, LinearScale(), schedule, options)[0]
    assert rates == pytest.approx([0.2] * 4 + [0.1] * 4)
    assert_close(state, plain(12, [3 * rate for rate in rates])[0], 1e-9)


def scheduler_state() -> tuple[dict[str, Any], dict[str, Any], str, bool]:
    init_process_group("gloo")
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    scheduler = schedulers.StepLR(optimizer, 2)
    before = scheduler.state_dict()
    HybridParallel(module, optimizer, lr_scheduler=scheduler)
    isinstance_still = isinstance(scheduler, schedulers.StepLR)
    return before, scheduler.state_dict(), type(scheduler).__name__, isinstance_still


def test_a_schedulers_state_and_type_stay_as_they_were() -> None:
    before, after, name, same = run_replicas(scheduler_state, 1)[0]
    assert after == before
    assert name == "StepLR"
    assert same


class Own:
    """A user's rule, which may look at everything there is."""

    def factor(self, state: ScalingState) -> float:
        assert state.init_batch_size == BATCH
        assert state.step == context().component(Metrics).step
        return 0.5 + state.step


def test_rules_of_ones_own() -> None:
    state, _, _ = run_replicas(_train_with, 1, Own(), None, {"smallest": 12})[0]
    assert_close(state, plain(12, [0.2 * (0.5 + n) for n in range(8)])[0], 1e-9)


def test_legw_warms_up_over_epochs_that_grow_with_the_batch() -> None:
    rule = LEGWScale(base_warmup_epochs=2, data_size=100)

    def factor(scale: float, progress: float) -> float:
        return rule.factor(
            ScalingState(scale=scale, gain=1.0, progress=progress, init_batch_size=10)
        )

    # 2 epochs of 10 steps; four times as many, each worth one, at four times the batch size.
    assert factor(1.0, 0.0) == pytest.approx(1 / 20)
    assert factor(1.0, 19.0) == 1.0
    assert factor(4.0, 39.0) == pytest.approx(2.0 * 40 / 80)
    assert factor(4.0, 1000.0) == 2.0
    assert LEGWScale(0, 100).factor(ScalingState(scale=4.0, gain=1.0)) == 2.0
    with pytest.raises(ConfigurationError, match="base_warmup_epochs=-1"):
        LEGWScale(-1, 100)
    with pytest.raises(ConfigurationError, match="data_size=0"):
        LEGWScale(1, 0)
