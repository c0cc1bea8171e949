"""Traps of the backward: gradients of inputs alone, twice over a graph, zero_grad.

Each was measured on torchgpipe 0.0.7 itself; the first lines of a test say what happened there.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipollux_hybrid import AdaptiveDataLoader, HybridParallel, SynchronizationError
from tests.hybrid.models import assert_close, gradients, make_data, make_model
from tests.hybrid.pipeline.trap_cases import (
    MODES,
    engine,
    forward,
    fresh_context,  # noqa: F401  # a fixture, which pytest finds by its name
)


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_gradients_of_inputs_alone_are_refused_under_recomputation(checkpoint: str) -> None:
    # Parameters' gradients changed silently, as a side effect.
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    inputs = torch.randn(4, 4, requires_grad=True)
    output = forward(engine(module, [1, 1], checkpoint), inputs, 4, 2)
    with pytest.raises(SynchronizationError, match=r"use activation_checkpoint='never'"):
        torch.autograd.grad(output.sum(), inputs)
    assert not gradients(module)


def test_gradients_of_inputs_alone_without_recomputation() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    inputs = torch.randn(4, 4, requires_grad=True)
    output = forward(engine(module, [1, 1], "never"), inputs, 4, 2)
    (gradient,) = torch.autograd.grad(output.sum(), inputs)
    (expected,) = torch.autograd.grad(module(inputs).sum(), inputs)
    torch.testing.assert_close(gradient, expected)
    assert not gradients(module)


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_second_backward_over_a_retained_graph(checkpoint: str) -> None:
    # IndexError: pop from an empty deque.
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    plain = copy.deepcopy(module)
    inputs = torch.randn(4, 4)
    for model in (plain, engine(module, [2, 1], checkpoint)):
        output = model(inputs) if model is plain else forward(model, inputs, 4, 2)
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()
    assert_close(gradients(module), gradients(plain), 1e-5)


def test_zero_grad_of_the_model_keeps_what_was_gathered() -> None:
    # It threw away the gradients of accumulation steps.
    module, plain = make_model("mlp"), make_model("mlp")
    data = make_data("mlp", 16)
    loader = AdaptiveDataLoader(data, batch_size=8)
    loader.autoscale_batch_size(8, (1, 2), gradient_accumulation=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = HybridParallel(module, optimizer, num_microbatches=2)
    for inputs, targets in loader:
        model.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for start in (0, 8):
        inputs, targets = data[list(range(start, start + 8))]
        plain_optimizer.zero_grad()
        F.cross_entropy(plain(inputs), targets).backward()
        plain_optimizer.step()
    assert_close(dict(module.state_dict()), dict(plain.state_dict()), 1e-12)
