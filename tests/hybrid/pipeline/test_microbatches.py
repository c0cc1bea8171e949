"""Micro-batches that follow the goodput, where the script leaves them open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from pipollux_hybrid import (
    AdaptiveDataLoader,
    HybridParallel,
    init_process_group,
    num_replicas,
    replica_rank,
)
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from pipollux_hybrid.optim.gradient_noise_scale import GradientNoiseScale
from pipollux_hybrid.pipeline.num_microbatches import candidate_microbatches, initial_microbatches
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_perfmodel import PerfParams
from tests.hybrid.models import make_data, make_model
from tests.hybrid.replicas import run_replicas

Used = list[tuple[int, int, int]]


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


def test_to_begin_with() -> None:
    assert initial_microbatches(1, 64) == 1
    assert initial_microbatches(2, 64) == 8
    assert initial_microbatches(4, 3) == 3
    assert initial_microbatches(2, 10) == 5, "eight cannot be had: 10 samples make 5 pairs"
    assert candidate_microbatches(2, 100) == (1, 2, 4, 8, 16, 32)
    assert candidate_microbatches(2, 1) == (1,)


def train(num_microbatches: int | None, proposals: dict[int, tuple[int, int, int]]) -> Used:
    """Train one epoch; replica 0 proposes. Micro-batches, batch size and accumulation steps."""
    init_process_group("gloo")
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    loader = AdaptiveDataLoader(make_data("mlp", 200), batch_size=16)
    loader.autoscale_batch_size(64, (1, 32), gradient_accumulation=True)
    model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=num_microbatches)
    used: Used = []
    for number, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        used.append((model.num_microbatches, loader.current_batch_size, loader.accumulation_steps))
        if replica_rank() == 0 and number in proposals:
            context().component(Metrics)._proposal = proposals[number]
    configuration = context().component(Metrics).configuration(loader.current_local_bsz)
    assert configuration.num_microbatches == used[-1][0]
    assert num_replicas() == 2
    return used


def test_all_replicas_change_at_the_same_step() -> None:
    proposals = {1: (8, 0, 2), 3: (8, 0, 4), 5: (12, 1, 3)}
    first, second = run_replicas(train, 2, None, proposals)
    assert first == second
    changes = [row for i, row in enumerate(first) if i == 0 or row != first[i - 1]]
    assert changes == [(8, 16, 0), (2, 16, 0), (4, 16, 0), (3, 48, 1)]


def test_a_number_of_the_scripts_own_stays() -> None:
    used, _ = run_replicas(train, 2, 4, {1: (8, 0, 2), 3: (16, 0, 0)})
    assert {row[0] for row in used} == {4}
    assert used[-1][1] == 32


@pytest.mark.parametrize(("fixed_cost", "expected"), [(1e-6, 32), (0.02, 2), (1.0, 1)])
def test_the_model_chooses(fixed_cost: float, expected: int) -> None:
    """Free micro-batches fill the pipeline; dear ones had better be few."""
    module = make_model("mlp")
    model = HybridParallel(module, torch.optim.SGD(module.parameters(), lr=0.1), num_stages=2)
    loader = AdaptiveDataLoader(make_data("mlp", 100), batch_size=64)
    loader.autoscale_batch_size(64, (64, 64))
    metrics = context().component(Metrics)
    metrics.restore_noise(GradientNoiseScale(64))
    for _ in range(3):
        metrics.noise.update(total_sqr=1.0, estimate_sqr=2.0, num_estimates=4, batch_size=64)
    metrics.perf_params = PerfParams(
        fixed_cost, 0.001, 0.1, 0.01, 0.1, 0.01, 1.0, (0.25,) * 2, (0.25,) * 2
    )
    best = metrics.best_shape()
    assert best == (64, 0, expected)
    goodput_fn = metrics.goodput_function()
    assert goodput_fn is not None
    goodputs = {m: goodput_fn.evaluate(1, 1, 64, 0, m) for m in candidate_microbatches(2, 64)}
    assert expected == max(goodputs, key=lambda m: goodputs[m])
    model.num_microbatches = 4
    assert metrics.best_shape() == (64, 0, 0), "the script's own"
