"""A small real training job that tells what it inherited, and what became of it."""

from __future__ import annotations

import io
import logging
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

from pipollux_hybrid import (
    AdaptiveDataLoader,
    HybridParallel,
    init_process_group,
    remaining_epochs_until,
)
from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry import autotuner, inheritance
from pipollux_hybrid.telemetry.metrics import Metrics

NUM_LAYERS = 4


class Told(NamedTuple):
    """What one replica tells."""

    at_first: list[dict[str, Any]]
    """What it began with."""
    at_last: list[dict[str, Any]]
    hints: dict[str, Any] | None
    lines: list[str]
    """Warnings."""


class Warnings(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def num_parameters(width: int) -> int:
    """Elements of the parameters of a model."""
    return NUM_LAYERS * (width * width + width)


def train(width: int) -> Told:
    """Train an epoch on 64 samples, in batches of 8."""
    words = Warnings()
    for module in (autotuner, inheritance):
        module.LOG.addHandler(words)
    init_process_group("gloo")
    metrics = context().component(Metrics)
    at_first = metrics.profile.inherited_to_json()
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(NUM_LAYERS)))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
    model = HybridParallel(layers, optimizer, num_stages=1)
    loader = AdaptiveDataLoader(TensorDataset(torch.randn(64, width)), batch_size=8)
    for _ in remaining_epochs_until(1):
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    metrics.fit()
    hints, at_last = metrics.hints(), metrics.profile.inherited_to_json()
    state, saved = context().component(States)["metrics.json"], io.BytesIO()
    state.save(saved)
    metrics.profile.inherit({})
    state.load(io.BytesIO(saved.getvalue()))
    assert (
        metrics.profile.inherited_to_json() == at_last
    )  # restarts and joining replicas have it, too
    return Told(at_first, at_last, hints.to_json_object() if hints else None, words.lines)
