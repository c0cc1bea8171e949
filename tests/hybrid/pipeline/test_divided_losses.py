"""Where batches are divided among replicas or accumulation steps, losses must be means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
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


def random_on_the_host(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output * np.random.rand(), labels)


class Centered(nn.Module):
    """A loss with a running mean, which each call changes."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3))

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(output - self.center, labels)
        self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
        return loss


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


of_a_module = nn.CrossEntropyLoss(CLASS_WEIGHTS)  # the weights are a buffer


@pytest.mark.parametrize(
    "loss_fn", [class_weights, of_a_module, padding, sums, contrast, weighted_wrongly]
)
def test_other_losses_are_refused(loss_fn: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(ConfigurationError, match="the loss is not a mean over samples: for this"):
        train(loss_fn)


@pytest.mark.parametrize("loss_fn", [mean, weighted, random, random_on_the_host, of_whole_batches])
def test_these_are_not(loss_fn: Callable[[Any, Any], Any]) -> None:
    train(loss_fn)


def test_of_whole_batches_every_loss_is_exact() -> None:
    train(sums, accumulates=False)


def test_the_script_may_want_the_mean() -> None:
    train(class_weights, loss_scope="batch")


def test_each_comparison_computes_the_loss_of_a_batch_and_its_halves() -> None:
    train(mean)
    assert calls == 6 * [4, 2, 2, 4]


def called_by_a_function(loss: Centered) -> Callable[[Any, Any], Any]:
    return lambda output, labels: loss(output, labels)


def called_with_a_default(loss: Centered) -> Callable[[Any, Any], Any]:
    def function(output: Tensor, labels: Tensor, loss: Centered = loss) -> Any:
        return loss(output, labels) if len(output) else later

    if not isinstance(loss, Centered):
        later = 0.0  # it has no value when the function is called
    return function


@pytest.mark.parametrize(
    "form",
    [
        lambda loss: loss,
        lambda loss: loss.forward,
        called_by_a_function,
        called_with_a_default,
    ],
)
def test_comparisons_do_not_change_a_running_mean(form: Callable[[Centered], Any]) -> None:
    found = []
    for scope in (None, "batch"):
        contexts.reset()
        loss = Centered()
        train(form(loss), loss_scope=scope)
        found.append(loss.center)
    assert found[0].any()
    assert torch.equal(*found), "the latter calls it once a batch"
