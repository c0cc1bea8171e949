"""What a job tells the scheduler beside its speed: its layers, its cut, and what is left."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from pipollux_hybrid import (
    AdaptiveBPTTIterator,
    AdaptiveDataLoader,
    HybridParallel,
    remaining_epochs_until,
)
from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_hybrid.telemetry.step_profile import StepConfiguration
from pipollux_perfmodel.hints import codec
from tests.hybrid.replicas import run_replicas


def train(*, with_sample: bool = True) -> tuple[HybridParallel, Metrics, list[float | None]]:
    """Train on 18 samples in batches of 4, for two epochs; and what was left after each step."""
    module = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    inputs = torch.randn(18, 6)
    loader = AdaptiveDataLoader(TensorDataset(inputs), batch_size=4)
    sample = inputs[:4] if with_sample else None
    model = HybridParallel(
        module, optimizer, num_stages=2, example_inputs=sample, memory_limit=None
    )
    metrics, left = context().component(Metrics), []
    for _ in remaining_epochs_until(2):
        for (batch,) in loader:
            left.append(metrics.samples_left)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    left.append(metrics.samples_left)
    metrics.fit()
    return model, metrics, left


def tell_everything() -> None:
    model, metrics, left = train()
    assert left == [None, 32, 28, 24, 20, 18, 14, 10, 6, 2, 0]
    hints = metrics.hints()
    assert hints is not None
    assert hints.layers == model.layer_profile
    assert hints.layers is not None
    assert hints.layers.num_layers == 4
    assert hints.balance == tuple(model.balance)
    assert (hints.num_stages, hints.memory_limit, hints.remaining_samples) == (2, None, 0.0)

    assert metrics.noise is not None
    assert hints.trained_samples == metrics.progress * metrics.noise.init_batch_size > 0
    # One allocation was measured, with batches of 4 and 2, so the fit leaves little over.
    assert hints.step_ratios is not None
    ((nodes, replicas, ratio),) = hints.step_ratios
    assert (nodes, replicas) == (1, 1)
    assert ratio == pytest.approx(1.0, rel=0.5)

    # Of a batch twice the initial one, a sample is worth less, by as much as AdaScale's gain says.
    metrics.samples_left, context().batch.scale = 100.0, 2.0
    noise = metrics.noise
    assert noise is not None
    worth = metrics.hints()
    assert worth is not None
    assert worth.remaining_samples == pytest.approx(100.0 * noise.gain(2.0) / 2.0)
    metrics.samples_left = None
    unknown = metrics.hints()
    assert unknown is not None
    assert unknown.remaining_samples is None

    # Too many layers to be sent: the rest is.
    codec.MAX_LAYERS = 3  # in this process alone
    fewer = metrics.hints()
    assert fewer is not None
    assert (fewer.layers, fewer.balance) == (None, None)

    # A restart in another number of stages: what was fitted before says nothing of these.
    context().pipeline.num_stages = 3
    assert metrics.hints() is None


def test_layers_cut_and_rest_are_told() -> None:
    run_replicas(tell_everything, 1)


def go_back_to_one_stage() -> None:
    """What it learnt of stages side by side outlives the restart, or it would be cut again."""
    _, metrics, _ = train()
    assert metrics.perf_params is not None
    assert metrics.overlap == metrics.perf_params.overlap
    metrics.overlap = seen = 0.25
    state, saved = context().component(States)["metrics.json"], io.BytesIO()
    state.save(saved)
    metrics.overlap = None
    saved.seek(0)
    state.load(saved)
    assert metrics.overlap == seen
    context().pipeline.num_stages, metrics.cut = 1, None
    one = StepConfiguration(1, 1, 1, 4, 1)
    for _ in range(8):
        metrics.profile.add_step(one, 0.01, 0.0, optimizer=True, disturbed=False)
    metrics.fit()
    hints = metrics.hints()
    assert hints is not None
    assert hints.perf_params is not None
    assert (hints.num_stages, hints.perf_params.overlap) == (1, seen)


def test_what_was_seen_of_overlap_is_kept() -> None:
    run_replicas(go_back_to_one_stage, 1)


def tell_of_ties() -> None:
    """Layers 1 to 3 share a weight: to the scheduler they are one, which nobody cuts."""
    module = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
    module[3].weight = module[1].weight
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = HybridParallel(module, optimizer, balance=[1, 4], example_inputs=torch.randn(4, 6))
    cut, profile = context().component(Metrics).cut, model.layer_profile
    assert cut is not None
    assert profile is not None
    merged = cut.in_blocks()
    assert merged is not None
    assert (merged[0].num_layers, merged[1]) == (3, (1, 2))
    alphas = [layer.forward_alpha for layer in profile.layers]
    assert merged[0].layers[1].forward_alpha == pytest.approx(sum(alphas[1:4]))


def test_tied_layers_are_told_as_one() -> None:
    run_replicas(tell_of_ties, 1)


def tell_without_sample() -> None:
    hints = train(with_sample=False)[1].hints()
    assert hints is not None
    assert (hints.layers, hints.balance, hints.memory_limit) == (None, None, None)


def test_without_a_sample_there_are_no_layers() -> None:
    run_replicas(tell_without_sample, 1)


def read_text() -> None:
    """41 tokens make 40 targets, 20 in each of two rows: four windows of five tokens."""
    module = nn.Sequential(nn.Embedding(41, 4), nn.Linear(4, 41))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    loader = AdaptiveBPTTIterator(torch.arange(41), batch_size=2, bptt_len=5)
    model, left = HybridParallel(module, optimizer), []
    for _ in remaining_epochs_until(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
            left.append(context().component(Metrics).samples_left)
    windows = 41 / 5
    told = [windows + (41 - 10 * step) / 5 for step in range(1, 4)]
    assert left[1:4] == pytest.approx(told)


def test_of_a_text_the_windows_count() -> None:
    run_replicas(read_text, 1)
