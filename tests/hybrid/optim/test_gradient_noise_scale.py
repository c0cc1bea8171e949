"""The gradient noise: estimates are unbiased, and what hooks gather is what it should be."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from pipollux_hybrid import AdaptiveDataLoader, HybridParallel, init_process_group
from pipollux_hybrid.job.context import context
from pipollux_hybrid.optim.gradient_noise_scale import GradientNoiseScale, RunningAverage
from pipollux_hybrid.pipeline.microbatch import microbatch_sizes
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.extent import first
from tests.hybrid.models import make_data, make_model
from tests.hybrid.replicas import run_replicas


@pytest.mark.parametrize("sizes", first(1, [[8, 8, 3], [8, 8, 8, 8], [5, 1]]))
def test_unbiased_against_known_noise(sizes: list[int]) -> None:
    """Gaussian gradients with |g|² = 2 and tr Σ = 6, estimated 5000 times.

    The mean lies within four standard errors of the truth.
    """
    generator = torch.Generator().manual_seed(0)
    truth = torch.full((8,), 0.5, dtype=torch.float64)
    total = sum(sizes)
    squares, traces = [], []
    for _ in range(5000):
        noise = torch.randn(len(sizes), 8, generator=generator, dtype=torch.float64)
        weights = torch.tensor(sizes, dtype=torch.float64)
        estimates = truth + noise * (6 / 8 / weights[:, None]).sqrt()
        mean = (weights[:, None] * estimates).sum(0) / total
        scale = GradientNoiseScale(init_batch_size=1)
        scale._sqr = scale._var = RunningAverage()  # read below, before any clamping
        scale._var = RunningAverage()
        scale.update(
            total_sqr=float(mean.square().sum()),
            estimate_sqr=float((weights * estimates.square().sum(1)).sum() / total),
            num_estimates=len(sizes),
            batch_size=total,
        )
        squares.append(scale._sqr.value)
        traces.append(scale._var.value)
    for values, expected in ((squares, 2.0), (traces, 6.0)):
        found = torch.tensor(values, dtype=torch.float64)
        error = float(found.std()) / math.sqrt(len(values))
        assert abs(float(found.mean()) - expected) < 4 * error


def gather(checkpoint: str, num_microbatches: int, max_local_bsz: int) -> tuple[float, float]:
    """Run one iteration of 12 samples; what the noise scale was told about it."""
    init_process_group("gloo")
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    loader = AdaptiveDataLoader(make_data("mlp", 12), batch_size=12)
    loader.autoscale_batch_size(12, (1, max_local_bsz), gradient_accumulation=True)
    model = HybridParallel(
        module,
        optimizer,
        num_stages=2,
        num_microbatches=num_microbatches,
        activation_checkpoint=checkpoint,
    )
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    params = context().component(Metrics).noise
    assert params is not None
    return params._sqr.value, params._var.value


def expected(parts: list[list[int]], num_microbatches: int) -> tuple[float, float]:
    """The same from gradients of micro-batches, one by one, by the formulas of the module."""
    data = make_data("mlp", 12)
    gradients, sizes = [], []
    for part in parts:
        start = 0
        for size in microbatch_sizes(len(part), num_microbatches):
            module = make_model("mlp")
            inputs, targets = data[part[start : start + size]]
            F.cross_entropy(module(inputs), targets).backward()
            flat = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
            gradients.append(torch.cat(flat))
            sizes.append(size)
            start += size
    weights = torch.tensor(sizes, dtype=torch.float64) / 12
    mean = sum(w * g for w, g in zip(weights, gradients, strict=True))
    spread = float(sum(w * g.square().sum() for w, g in zip(weights, gradients, strict=True)))
    count, total = len(sizes), float(mean.square().sum())
    sqr = (count * total - spread) / (count - 1)
    return sqr, (spread - total) * 12 / (count - 1) / 12


@pytest.mark.parametrize("checkpoint", first(1, ["except_last", "always", "never"]))
def test_micro_batches_of_one_replica(checkpoint: str) -> None:
    found = run_replicas(gather, 1, checkpoint, 5, 12)[0]
    assert found == pytest.approx(expected([list(range(12))], 5), rel=1e-5)


@pytest.mark.parametrize("checkpoint", first(1, ["except_last", "always", "never"]))
def test_micro_batches_accumulation_and_replicas_together(checkpoint: str) -> None:
    # Accumulation step a of replica r takes 3 samples from 6 a + 3 r on.
    parts = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    for found in run_replicas(gather, 2, checkpoint, 2, 3):
        assert found == pytest.approx(expected(parts, 2), rel=1e-5)


def differencing() -> tuple[bool, float]:
    init_process_group()
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    loader = AdaptiveDataLoader(make_data("mlp", 64), batch_size=8)
    model = HybridParallel(module, optimizer)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    noise = context().component(Metrics).noise
    assert noise is not None
    assert noise.grad_params is not None
    return noise.differenced, noise.grad_params.var


def test_a_single_estimate_a_step_falls_back_on_successive_steps() -> None:
    differenced, var = run_replicas(differencing, 1)[0]
    assert differenced
    assert var > 0.0


def test_real_estimates_replace_differenced_ones() -> None:
    noise = GradientNoiseScale(init_batch_size=8)
    arguments = {"num_estimates": 2, "batch_size": 8}
    noise.update(total_sqr=100.0, estimate_sqr=300.0, **arguments, differenced=True)
    noise.update(total_sqr=1.5, estimate_sqr=2.0, **arguments)
    assert noise.grad_params is not None
    assert noise.grad_params.sqr == pytest.approx(1.0)
    assert not noise.differenced


def test_gain_grows_from_one_to_the_scale() -> None:
    noise = GradientNoiseScale(init_batch_size=32)
    assert noise.gain(4.0) == 1.0, "nothing is known yet"
    noise.update(total_sqr=1.5, estimate_sqr=3.0, num_estimates=4, batch_size=32)
    gains = [noise.gain(scale) for scale in (1.0, 2.0, 4.0, 1e9)]
    assert gains == sorted(gains)
    assert gains[0] == 1.0
    assert gains[1] < 2.0
    assert gains[-1] == pytest.approx(1.5)


def test_not_finite_gradients_are_passed_over() -> None:
    noise = GradientNoiseScale(init_batch_size=8)
    noise.update(total_sqr=math.inf, estimate_sqr=1.0, num_estimates=2, batch_size=8)
    assert noise.grad_params is None


def adam_geometry() -> tuple[float, float]:
    """After five steps norms are taken in Adam's geometry; compare with a computation by hand."""
    init_process_group()
    module = make_model("mlp")
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    data = make_data("mlp", 56)
    loader = AdaptiveDataLoader(data, batch_size=8)
    model = HybridParallel(module, optimizer, num_microbatches=2, activation_checkpoint="always")
    by_hand = 0.0
    told: list[float] = []
    for number, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        if number == 5:
            for parameter in module.parameters():
                state = optimizer.state[parameter]
                divisor = (state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))).sqrt() + 1e-8
                assert parameter.grad is not None
                by_hand += float((parameter.grad / divisor).square().sum())
            gradients = [p.grad for p in module.parameters()]
            told.append(model._noise._product(gradients, gradients))
        optimizer.step()
    return told[0], by_hand


def test_adam_measures_noise_in_its_own_geometry() -> None:
    told, by_hand = run_replicas(adam_geometry, 1)[0]
    assert told == pytest.approx(by_hand, rel=1e-5)
