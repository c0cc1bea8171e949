"""Auxiliary losses that take another way than the model's output are refused, in both engines."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import ConfigurationError, init_process_group
from pipollux_hybrid.job import context as contexts
from tests.extent import turns
from tests.hybrid.layer_cases import Case, WithLinear, check_case, linear, numbers, train
from tests.hybrid.stage_processes.training import run_stages


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


class Scaled(torch.autograd.Function):
    """Passes its input on; the auxiliary loss gets a gradient of 1, or one that follows its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor, injects: bool) -> Tensor:
        ctx.injects, ctx.like = injects, torch.ones_like(auxiliary)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        auxiliary = ctx.like if ctx.injects else gradient.sum(1)
        return gradient, auxiliary, None


class Gate(WithLinear):
    def __init__(self, injects: bool) -> None:
        super().__init__()
        self.injects = injects

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        result: Tensor = Scaled.apply(y, y.square().sum(1), self.injects)  # type: ignore[no-untyped-call]  # torch's
        return result


def gates(injects: bool) -> Case:
    return Case(lambda: [linear(), Gate(injects), nn.Tanh(), linear()], lambda: numbers(1))


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_a_function_that_injects_a_gradient(mode: str) -> None:
    with pytest.raises(ConfigurationError, match=r"stage 0 gives its .* \(Scaled\), as functions"):
        train(gates(injects=True), activation_checkpoint=mode)


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_a_function_that_does_not(mode: str) -> None:
    case = gates(injects=False)
    check_case(train(case, activation_checkpoint=mode), case)


def said_in_processes(case: Callable[[], Case], mode: str) -> str:
    init_process_group("gloo", timeout=60.0)
    try:
        train(case(), activation_checkpoint=mode)
    except Exception as error:  # which is told to the test
        return f"{type(error).__name__}: {error}"
    return "nothing"


def injecting() -> Case:
    return gates(injects=True)


@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_function_that_injects_a_gradient_in_a_stage_of_its_own(mode: str) -> None:
    (found,) = run_stages(said_in_processes, 1, 2, injecting, mode)
    assert any("ConfigurationError: stage 0 gives its" in text for text in found), found
    assert "nothing" not in found


class Keeps(WithLinear):
    """Keeps an auxiliary loss, as a value or in a list, with its graph or without."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.kept = how, None
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        auxiliary = y.square().mean(1) if self.how == "rows" else y.square().mean()
        if self.how == "list":
            self.losses = [auxiliary]
        else:
            self.kept = auxiliary.detach() if self.how == "detached" else auxiliary
        return y


def keeping(how: str, used: Callable[[Keeps], Any]) -> Case:
    layers: list[nn.Module] = []

    def make() -> list[nn.Module]:
        layers[:] = [linear(), Keeps(how), nn.Tanh(), linear()]
        return layers

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        keeps = layers[1]
        assert isinstance(keeps, Keeps)
        return F.mse_loss(output, targets) + used(keeps)

    return Case(make, lambda: numbers(1), loss=loss)


USES: dict[str, Callable[[Keeps], Any]] = {
    "scalar": lambda layer: 0.1 * layer.kept,
    "rows": lambda layer: layer.kept.mean(),
    "list": lambda layer: sum(layer.losses).sum(),
}


@pytest.mark.parametrize(("how", "mode"), turns(list(USES), ["always", "except_last", "never"]))
def test_a_loss_that_a_layer_keeps(how: str, mode: str) -> None:
    with pytest.raises(ConfigurationError, match=r"attribute '\w+' of layer '1' is used outside"):
        train(keeping(how, USES[how]), activation_checkpoint=mode)


@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_kept_tensor_may_be_shown(mode: str) -> None:
    case = keeping("scalar", lambda layer: 0.0 * len(f"{layer.kept.detach().sum():.3f}"))
    check_case(train(case, activation_checkpoint=mode), case)


class Remembers(WithLinear):
    """Computes with a tensor that it keeps, as a cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None or len(self.cache) != x.shape[1]:
            self.cache = torch.linspace(0.5, 1.5, x.shape[1], dtype=x.dtype)
        y: Tensor = self.linear(x) * self.cache + torch.cat([self.cache[:2]] * 2)
        return y


@pytest.mark.parametrize("mode", ["always", "never"])
def test_layers_compute_with_what_they_keep(mode: str) -> None:
    case = Case(lambda: [linear(), Remembers(), Remembers(), linear()], lambda: numbers(1))
    check_case(train(case, activation_checkpoint=mode), case)
    layer = Remembers()
    contexts.reset()
    train(case._replace(layers=lambda: [linear(), layer, nn.Tanh(), linear()]))
    copied = copy.deepcopy(layer)
    torch.testing.assert_close(copied(numbers(1)), copied(numbers(1)))


def elsewhere() -> Case:
    """The last process reads an attribute of the first one's layer."""
    return keeping("scalar", lambda layer: layer.kept)


def gathered() -> Case:
    """The loss adds up what the layers of its process keep, if they do."""
    return keeping("scalar", lambda _: 0.0)


@pytest.mark.parametrize("case", [elsewhere, gathered])
def test_a_loss_that_a_layer_of_another_process_keeps(case: Callable[[], Case]) -> None:
    (found,) = run_stages(said_in_processes, 1, 2, case, "always")
    assert "attribute 'kept' of layer '1' is a scalar with a graph" in found[0]
    assert "nothing" not in found
