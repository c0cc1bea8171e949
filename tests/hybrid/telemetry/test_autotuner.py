"""Batch sizes by what was measured with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pipollux_hybrid import AdaptiveDataLoader, HybridParallel
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.batch import BatchShape
from pipollux_hybrid.job.context import context
from pipollux_hybrid.optim.gradient_noise_scale import GradientNoiseScale
from pipollux_hybrid.telemetry.autotuner import RETUNE_GAIN
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_hybrid.telemetry.step_profile import STEADY
from pipollux_perfmodel import PerfParams
from pipollux_perfmodel.goodput.size_corrections import TRIAL
from tests.hybrid.models import make_data, make_model


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


class Job:
    """A job of two stages and two micro-batches, whose model is known, in training."""

    def __init__(self) -> None:
        module = make_model("mlp")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        HybridParallel(module, optimizer, num_stages=2, num_microbatches=2)
        loader = AdaptiveDataLoader(make_data("mlp", 100), batch_size=16)
        loader.autoscale_batch_size(256, (16, 256))
        self.metrics: Any = context().component(Metrics)
        context().batch.num_microbatches = 2
        self.metrics.restore_noise(GradientNoiseScale(16))
        for _ in range(3):
            self.metrics.noise.update(
                total_sqr=1.0, estimate_sqr=4.0, num_estimates=4, batch_size=16
            )
        self.metrics.perf_params = PerfParams(
            0.02, 0.001, 0.1, 0.01, 0.1, 0.01, 1.0, (0.25,) * 2, (0.25,) * 2
        )

    def best(self) -> int:
        return int(self.metrics.best_shape()[0])

    def train(
        self, size: int, slower: float, steps: int = STEADY, scatter: float = 0.0
    ) -> tuple[int, int, int]:
        """Train steps of a size that take so many times what the model says; what it proposes."""
        seconds = slower * float(self.metrics.goodput_function().step_time(1, 1, size, 0, 2).total)
        for number in range(2 + steps):  # two warm up
            took = seconds * (1 + scatter * (number % 3 - 1))
            self.metrics.profile.add_step(
                self.metrics.configuration(size), took, 0.0, optimizer=True
            )
        self.metrics._training_shape = BatchShape(size, 1, 0)
        proposal: tuple[int, int, int] = self.metrics._better_shape()
        return proposal


def test_a_size_that_disappoints_is_left() -> None:
    job = Job()
    first = job.best()
    assert job.train(first, 1.3, STEADY - 1) == (0, 0, 0), "a few slow steps say nothing"
    second, _, _ = job.train(first, 1.3)
    assert second not in (0, first)
    # The other one is as slow as it: there is nothing to be had.
    size = second
    for _ in range(20):
        proposal, _, _ = job.train(size, 1.3)
        if proposal == 0:
            break
        size = proposal
    assert proposal == 0


@pytest.mark.parametrize("scatter", [0.0, 0.2])
def test_where_steps_scatter_the_model_counts(scatter: float) -> None:
    """A machine that is slow for some seconds, and fast for others, makes no size the best one."""
    job = Job()
    first = size = job.best()
    for number in range(20):
        proposal, _, _ = job.train(size, (1.2, 0.85)[number % 2], scatter=scatter)
        if proposal == 0:
            break
        size = proposal
    assert proposal == 0
    goodput = job.metrics.goodput_function()
    value = {a: goodput.evaluate(1, 1, a, 0, 2) for a in (first, size)}
    assert (value[size] * RETUNE_GAIN > value[first]) == (scatter > 0)


def test_a_size_that_is_better_than_the_model_says_is_found_and_kept() -> None:
    job = Job()

    def slower(size: int) -> float:
        return 0.9 if size < first else 1.0

    size = first = job.best()
    tried = [size]
    while (proposal := job.train(size, slower(size))[0]) and proposal not in tried:
        size = proposal
        tried.append(size)
        assert len(tried) < 20
    known = proposal or size
    goodput = job.metrics.goodput_function()
    value = {a: goodput.evaluate(1, 1, a, 0, 2) / slower(a) for a in tried}
    assert known < first
    assert value[known] * RETUNE_GAIN * 1.001 >= max(value.values()) > value[first]
    assert min(value.values()) > value[first] * (1 - TRIAL)
