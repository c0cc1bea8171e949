"""Where batches are divided among replicas or accumulation steps, losses must be means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipollux_hybrid import AdaptiveDataLoader, HybridParallel, WeightedLoss, init_process_group
from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job import context as contexts

CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 5.0])
calls: list[int] = []


def class_weights(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels, CLASS_WEIGHTS)


def padding(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels, ignore_index=0)


def sums(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels, reduction="sum")


def contrast(output: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(output @ output.t(), torch.arange(len(output)))


def mean(output: Tensor, labels: Tensor) -> Tensor:
    calls.append(len(labels))
    output /= 2  # in place
    return F.cross_entropy(output, labels, label_smoothing=0.1)


def weighted(output: Tensor, labels: Tensor) -> WeightedLoss:
    loss = F.cross_entropy(output, labels, ignore_index=0, reduction="sum")
    return WeightedLoss(loss, (labels != 0).sum())


def weighted_wrongly(output: Tensor, labels: Tensor) -> WeightedLoss:
    return WeightedLoss(F.cross_entropy(output, labels, reduction="sum"), 1.0)


def random(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.dropout(output), labels)


def of_whole_batches(output: Tensor, labels: Tensor) -> Tensor:
    return (F.cross_entropy(output, labels, reduction="none") * torch.ones(4)).mean()


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    contexts.reset()
    init_process_group("gloo")
    calls.clear()
    yield
    contexts.reset()


def train(loss_fn: Callable[[Any, Any], Any], *, accumulates: bool = True, **options: Any) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 3), torch.arange(24) % 3)
    module = nn.Sequential(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = AdaptiveDataLoader(data, batch_size=8)
    if accumulates:
        loader.autoscale_batch_size(8, (1, 4), gradient_accumulation=True)
    model = HybridParallel(module, optimizer)
    for x, y in loader:
        optimizer.zero_grad()
        model.train_step(x, y, loss_fn, **options)
        optimizer.step()


@pytest.mark.parametrize("loss_fn", [class_weights, padding, sums, contrast, weighted_wrongly])
def test_other_losses_are_refused(loss_fn: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(ConfigurationError, match="the loss is not a mean over samples: for this"):
        train(loss_fn)


@pytest.mark.parametrize("loss_fn", [mean, weighted, random, of_whole_batches])
def test_these_are_not(loss_fn: Callable[[Any, Any], Any]) -> None:
    train(loss_fn)


def test_of_whole_batches_every_loss_is_exact() -> None:
    train(sums, accumulates=False)


def test_the_script_may_want_the_mean() -> None:
    train(class_weights, loss_scope="batch")


def test_each_comparison_computes_the_loss_of_a_batch_and_its_halves() -> None:
    train(mean)
    assert calls == 6 * [4, 2, 2, 4]
