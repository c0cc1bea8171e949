"""Gradients that a script changes on accumulation steps: it is told so, and what to do instead."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipollux_hybrid import AdaptiveDataLoader, GradScaler, HybridParallel
from pipollux_hybrid.job import context as contexts
from tests.hybrid.models import assert_close, gradients, make_data, make_model

SAMPLES, ATOMIC, MAX_NORM = 12, 4, 0.1
WARNING = r"accumulation step.*model\.clip_grad_norm_.*instead of torch\.nn\.utils\.clip_grad_norm_"
Clip = Callable[[HybridParallel], object]


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


def clipped_by_torch(model: HybridParallel) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


def clipped_by_model(model: HybridParallel) -> object:
    return model.clip_grad_norm_(MAX_NORM)


def iteration(clip: Clip, num_epochs: int = 1, *, scaled: bool = False) -> nn.Sequential:
    """Iterations of three parts that end with clipped gradients; the parameters stay."""
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    loader = AdaptiveDataLoader(make_data("mlp", SAMPLES), batch_size=SAMPLES)
    loader.autoscale_batch_size(SAMPLES, (ATOMIC, ATOMIC), gradient_accumulation=True)
    model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=2)
    scaler = GradScaler("cpu", enabled=scaled)
    for _ in range(num_epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(inputs), targets)).backward()
            scaler.unscale_(optimizer)
            clip(model)
            scaler.step(optimizer)
            scaler.update()
    return module


def plain_iteration() -> nn.Sequential:
    module, (inputs, targets) = make_model("mlp"), make_data("mlp", SAMPLES)[:]
    F.cross_entropy(module(inputs), targets).backward()
    nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
    return module


@pytest.mark.parametrize("scaled", [False, True])
def test_torchs_own_clipping_is_told(scaled: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = iteration(clipped_by_torch, num_epochs=2, scaled=scaled)
    assert [re.search(WARNING, str(each.message)) is not None for each in caught] == [True]
    assert caught[0].filename == __file__, "it names the line of the script"
    wrong = gradients(ours)["0.weight"] - gradients(plain_iteration())["0.weight"]
    assert wrong.abs().max() > 1e-3, "it is worth a warning"


def test_the_models_clipping_is_exact_and_goes_without() -> None:
    assert_close(gradients(iteration(clipped_by_model)), gradients(plain_iteration()), 1e-12)


def test_gradients_thrown_away_are_told() -> None:
    with pytest.warns(UserWarning, match="reset them with optimizer.zero_grad"):
        iteration(lambda model: model.module.zero_grad())


def test_a_penalty_with_a_backward_of_its_own_goes_without() -> None:
    def penalise(model: HybridParallel) -> None:
        sum(p.square().sum() for p in model.parameters()).backward()

    assert gradients(iteration(penalise)), "and warnings are errors"
