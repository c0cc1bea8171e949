"""Parameters that are frozen and unfrozen after the conversion, in both engines."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipollux_hybrid import (
    ConfigurationError,
    HybridParallel,
    as_layers,
    init_process_group,
    replica_rank,
)
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from tests.extent import turns
from tests.hybrid.conversion.small_models import ROWS, loss_of, make_batches, make_model
from tests.hybrid.stage_processes.training import run_stages

STEPS, CHANGE = 4, 2

FIRST, LAST = (
    ("embed", "wte", "wpe", ".0."),
    ("head", "norm", "ln_f", "layers.1", "h.1", "classifier"),
)


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


def freeze(model: nn.Module, parts: tuple[str, ...]) -> None:
    """Freeze the parameters whose names have one of these parts, and unfreeze the others."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in parts))


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(
    name: str, before: tuple[str, ...], after: tuple[str, ...], options: dict[str, Any]
) -> dict[str, Tensor]:
    """Train with two stages; what is frozen changes on the way."""
    contexts.reset()
    init_process_group("gloo")
    original, batches = make_model(name), make_batches(name, STEPS)
    freeze(original, before)
    optimizer = optimizer_of(original)
    given: dict[str, Any] = {"num_stages": 2, "num_microbatches": 2, **options}
    model = HybridParallel(original, optimizer, example_inputs=batches[0][0], **given)
    share = slice(replica_rank(), ROWS, context().env.num_replicas)
    for step, (batch, targets) in enumerate(batches):
        if step == CHANGE:
            freeze(model, after)
        optimizer.zero_grad()
        mine = {key: x[share] for key, x in batch.items()}
        model.train_step(mine, targets[share], loss_of)
        optimizer.step()
    state: dict[str, Tensor] = model.state_dict()
    return state


def assert_as_in_a_loop(
    found: dict[str, Tensor], name: str, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    model = make_model(name)
    freeze(model, before)
    optimizer = optimizer_of(model)
    for step, (batch, targets) in enumerate(make_batches(name, STEPS)):
        if step == CHANGE:
            freeze(model, after)
        optimizer.zero_grad()
        loss_of(model(**batch), targets).backward()
        optimizer.step()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(found[key].cpu(), value, rtol=1e-9, atol=1e-11, msg=key)


CASES = [("gpt2", (), FIRST), ("gpt2", FIRST, ()), ("llama", ("model.",), ()), ("vit", LAST, FIRST)]
"""A model, and the parts that are frozen at first and later."""


@pytest.mark.parametrize(("case", "checkpoint"), turns(CASES, ["never", "always"]))
def test_in_one_process(
    case: tuple[str, tuple[str, ...], tuple[str, ...]], checkpoint: str
) -> None:
    name, before, after = case
    options = {"activation_checkpoint": checkpoint}
    assert_as_in_a_loop(trained(name, before, after, options), name, before, after)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("before", "after"), [(FIRST, LAST), ((), FIRST)])
def test_in_stage_processes_with_two_replicas(
    before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    options = {"schedule": "1f1b"}
    environment = {"PIPOLLUX_NUM_STAGES": "2"}
    given = ("llama", before, after, options)
    stages = run_stages(trained, 2, 2, *given, environment=environment)
    assert_as_in_a_loop(stages[0][0], "llama", before, after)


class Reads(nn.Module):
    """Asks which parameters are frozen, between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.scale = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.prepared(self.embedding(x))
        for block in self.blocks:
            x = block(x)
        return x

    def prepared(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class OfParameter(Reads):
    def prepared(self, x: Tensor) -> Tensor:
        return x * self.scale if self.scale.requires_grad else x


class OfModule(Reads):
    def prepared(self, x: Tensor) -> Tensor:
        trained = any(parameter.requires_grad for parameter in self.embedding.parameters())
        return x if trained else x.detach() * 3


class OfResult(Reads):
    def prepared(self, x: Tensor) -> Tensor:
        return x * self.scale if x.requires_grad else x


class ForContext(Reads):
    def prepared(self, x: Tensor) -> Tensor:
        trained = self.scale.requires_grad
        with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
            return x * self.scale


@pytest.mark.parametrize("frozen_first", [False, True])
@pytest.mark.parametrize("model", [OfParameter, OfModule, OfResult, ForContext])
def test_a_model_that_asks_what_is_frozen(model: type[Reads], frozen_first: bool) -> None:
    """Layers have what the model did at the conversion; after a change they stop."""
    made, x = model().double(), torch.randn(3, 4, dtype=torch.float64)
    parts = ("embedding", "scale")
    freeze(made, parts if frozen_first else ())
    if model is OfResult and not frozen_first:
        with pytest.raises(
            ConfigurationError, match=r"it reads requires_grad or torch\.is_grad_en"
        ):
            as_layers(made, x)
        return
    expected = copy.deepcopy(made)
    layers = as_layers(made, x)
    with torch.no_grad():
        assert torch.equal(layers(x), expected(x))
    for each in (expected(x), layers(x)):
        each.sum().backward()
    for mine, theirs in zip(made.parameters(), expected.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)
    freeze(made, () if frozen_first else parts)
    sentence = rf"test_frozen\.py:\d+: .* was {not frozen_first} .* is {frozen_first} now"
    with pytest.raises(ConfigurationError, match=sentence):
        layers(x)
