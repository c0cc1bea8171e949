"""Auxiliary losses that take another way than the model's output are refused, in both engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipollux_hybrid import ConfigurationError, init_process_group
from pipollux_hybrid.job import context as contexts
from tests.hybrid.layer_cases import Case, WithLinear, check_case, linear, numbers, train
from tests.hybrid.stage_processes.training import run_stages


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


class Scaled(torch.autograd.Function):
    """Passes its input on; gives the auxiliary loss a gradient of 1, or one that follows its own."""

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
