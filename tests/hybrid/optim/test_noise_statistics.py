"""The noise estimate is unbiased: real pipelines on a problem whose gradient noise is known.

Two layers, one on each stage, add linear readouts of a sample x ~ N(0, I_d) to a prediction of
t = w*·x + σ ε. With the loss (prediction - t)² / 2 and δ = w₁ + w₂ - w*, each layer's gradient of
one sample is x (x·δ - σ ε), hence, for components i of either layer,

    mean       δ_i                                  variance   |δ|² + δ_i² + σ²

and with weights a_i of the squares (Adam's geometry, 1 for SGD), over both layers,

    |g|² = 2 Σ a_i δ_i²                             tr Σ = 2 Σ a_i (|δ|² + δ_i² + σ²)

Samples are fresh at every step and the learning rate is 0, so a run's estimates are independent.
Their mean has to lie within its 99.9 % confidence interval around the truth: 3.29 standard errors,
which are below 30 % of |g|² and below 18 % of tr Σ in every case here.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipollux_hybrid import AdaptiveDataLoader, HybridParallel, init_process_group
from pipollux_hybrid.job.context import context
from pipollux_hybrid.optim import noise_meter
from pipollux_hybrid.optim.gradient_noise_scale import GradientNoiseScale, MeasuredNoise
from tests.extent import first
from tests.hybrid.replicas import run_replicas

WIDTH = 8
SIGMA = 1.0
STEPS = 300
BATCH = 16
QUANTILE = 3.29
"""Of the normal distribution, 99.9 % two-sided."""
DELTA = torch.linspace(0.4, 1.2, WIDTH, dtype=torch.float64)
SECOND_MOMENT = torch.linspace(0.25, 4.0, WIDTH, dtype=torch.float64)
EPS = 0.1


class First(nn.Module):
    """Puts a readout of the sample behind it: [b, d] to [b, d + 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(DELTA / 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, (x @ self.weight)[:, None]], dim=1)


class Second(First):
    """Adds another readout: [b, d + 1] to [b]."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, WIDTH] + inputs[:, :WIDTH] @ self.weight


class Recorder(GradientNoiseScale):
    """Keeps each step's estimates as they are, before averages and bounds."""

    def update(self, **arguments: Any) -> None:
        alone = GradientNoiseScale(self.init_batch_size)
        alone.update(**arguments)
        self.steps.append((alone._sqr.value, alone._var.value * self.init_batch_size))
        super().update(**arguments)


def record(
    num_microbatches: int,
    local: int,
    checkpoint: str,
    *,
    adam: bool = False,
    jump: float = 0.0,
    num_steps: int = STEPS,
) -> tuple[list[tuple[float, float]], bool]:
    """Each step's estimates of |g|² and tr Σ, and whether they come from successive steps."""
    init_process_group("gloo")
    noise_meter.MEASURED_EVERY = 1  # in this process alone
    generator = torch.Generator().manual_seed(5)
    shape = (num_steps * BATCH, WIDTH)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    targets = SIGMA * torch.randn(shape[0], generator=generator, dtype=torch.float64)
    module = nn.Sequential(First(), Second())
    kind = torch.optim.Adam if adam else torch.optim.SGD
    options = {"betas": (0.9, 1 - 1e-12), "eps": EPS} if adam else {}
    optimizer = kind(module.parameters(), lr=0.0, **options)
    if adam:
        for parameter in module.parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(1e15, dtype=torch.float64),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": SECOND_MOMENT.clone(),
            }
    loader = AdaptiveDataLoader(TensorDataset(inputs, targets), batch_size=BATCH)
    loader.autoscale_batch_size(BATCH, (1, local), gradient_accumulation=True)
    model = HybridParallel(
        module,
        optimizer,
        num_stages=2,
        num_microbatches=num_microbatches,
        activation_checkpoint=checkpoint,
    )
    noise = context().component(MeasuredNoise).scale = Recorder(BATCH)
    noise.steps = []
    for x, t in loader:
        optimizer.zero_grad()
        ((model(x) - t).square() / 2).mean().backward()
        optimizer.step()
        with torch.no_grad():
            module[0].weight += jump if len(noise.steps) % 2 else -jump
    return noise.steps, noise.differenced


def truth(delta: Tensor, weights: Tensor | float = 1.0) -> tuple[float, float]:
    """|g|² and tr Σ by the formulas above."""
    variance = delta.square().sum() + delta.square() + SIGMA**2
    return float(2 * (weights * delta.square()).sum()), float(2 * (weights * variance).sum())


def check(steps: list[tuple[float, float]], expected: tuple[float, float]) -> None:
    """Fail unless the means lie within their 99.9 % confidence intervals around the truth."""
    for values, true, widest in zip(zip(*steps, strict=True), expected, (0.30, 0.18), strict=True):
        found = torch.tensor(values, dtype=torch.float64)
        error = float(found.std()) / math.sqrt(len(values))
        assert QUANTILE * error < widest * true, "the test could not tell"
        assert abs(float(found.mean()) - true) < QUANTILE * error


CASES = [
    # (R, M, s); two replicas of two micro-batches are first in Adam's geometry
    ((1, 1, 3), "never"),
    ((2, 2, 1), "except_last"),
    ((1, 4, 0), "always"),
    ((1, 2, 1), "except_last"),
    ((1, 2, 1), "never"),
    ((2, 1, 0), "always"),
]


@pytest.mark.parametrize("case", first(1, CASES), ids=str)
def test_estimates_are_unbiased(case: tuple[tuple[int, int, int], str]) -> None:
    (replicas, microbatches, accum_steps), checkpoint = case
    local = BATCH // replicas // (accum_steps + 1)
    for steps, differenced in run_replicas(record, replicas, microbatches, local, checkpoint):
        assert not differenced
        assert len(steps) == STEPS
        check(steps, truth(DELTA))


@pytest.mark.exhaustive
@pytest.mark.parametrize("configuration", first(1, [(2, 2, 1), (1, 4, 0)]), ids=str)
def test_estimates_are_unbiased_in_adams_geometry(configuration: tuple[int, int, int]) -> None:
    replicas, microbatches, accum_steps = configuration
    local = BATCH // replicas // (accum_steps + 1)
    weights = 1 / (SECOND_MOMENT.sqrt() + EPS) ** 2
    for steps, _ in run_replicas(_record_adam, replicas, microbatches, local):
        check(steps, truth(DELTA, weights))


def _record_adam(num_microbatches: int, local: int) -> tuple[list[tuple[float, float]], bool]:
    return record(num_microbatches, local, "except_last", adam=True)


def _record_jumping(jump: float) -> tuple[list[tuple[float, float]], bool]:
    return record(1, BATCH, "never", jump=jump, num_steps=2 * STEPS)


@pytest.mark.exhaustive
def test_successive_steps_are_unbiased_while_parameters_stand_still() -> None:
    steps, differenced = run_replicas(_record_jumping, 1, 0.0)[0]
    assert differenced
    # Neighbouring estimates share a step; every second one is independent.
    check(steps[::2], truth(DELTA))


@pytest.mark.exhaustive
def test_successive_steps_take_a_moving_gradient_for_noise() -> None:
    """Two steps whose true gradients differ by Δ show B |Δ|² / 2 more than tr Σ.

    The parameters go to and fro by 0.6 in each component, and so do both layers' gradients. What
    shows as |g|² is the inner product of the two.
    """
    steps, differenced = run_replicas(_record_jumping, 1, -0.6)[0]
    assert differenced
    here, there = truth(DELTA), truth(DELTA + 0.6)
    bias = BATCH * 2 * WIDTH * 0.6**2 / 2
    mean = (here[1] + there[1]) / 2
    assert bias > 0.2 * mean, "more than the widest interval, so the test can tell"
    inner = 2 * float((DELTA * (DELTA + 0.6)).sum())
    check(steps[::2], (inner, mean + bias))


def _train_with_short_batches() -> list[list[float]]:
    """Return the parameters after each step; the sixth batch is one sample, replica 0's."""
    init_process_group("gloo")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(11, 3, dtype=torch.float64))
    loader = AdaptiveDataLoader(data, batch_size=1)
    loader.autoscale_batch_size(8, (1, 1))
    model = HybridParallel(module, optimizer)
    found = []
    for _ in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            found.append([y for p in module.parameters() for y in p.detach().flatten().tolist()])
    return found


def test_a_replica_without_a_share_measures_in_the_same_geometry() -> None:
    """In step 6 weights of squares are taken for the first time, and kept for some steps."""
    ours, theirs = run_replicas(_train_with_short_batches, 2)
    assert len(ours) == 12
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one == other, step
