"""Optimizers that are none of torch's are tried on small tensors before a model is divided."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipollux_hybrid.checkpoint.separate_steps import EACH_ALONE, steps_separately, try_steps

Optimizer = torch.optim.Optimizer


class Each(Optimizer):
    """Steps each parameter by its own gradient."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    def before(self) -> None:
        """What a step begins with."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        return -group["lr"] * p.grad

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # takes no closure
        self.before()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.change(p, group))


class Lion(Each):
    """Chen et al., Symbolic discovery of optimization algorithms, algorithm 2."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
        change = -group["lr"] * (0.9 * mean + 0.1 * p.grad).sign()
        mean.lerp_(p.grad, 0.01)
        return change


class Lars(Each):
    """A norm of each layer."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return super().change(p, group) * p.norm()


class ClipsAll(Each):
    """As published code of LAMB does: all gradients are divided by their norm above 1."""

    max_norm = 1.0

    def before(self) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = math.hypot(*(float(x.norm()) for x in gradients if x is not None))
        self.factor = 1.0 / max(1.0, norm / self.max_norm)

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return super().change(p, group) * self.factor


class Distance(Each):
    """Estimates a rate from all parameters, as D-Adaptation and Prodigy do; the first steps are
    alike.
    """

    def before(self) -> None:
        pairs = [(self.state[p], p) for group in self.param_groups for p in group["params"]]
        for state, p in pairs:
            state.setdefault("first", p.clone())
        moved = [float(((x["first"] - p) * p.grad).sum()) for x, p in pairs if p.grad is not None]
        self.rate = max(getattr(self, "rate", 1e-6), 1e-3 * sum(moved))

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return super().change(p, group) * self.rate


class Noise(Each):
    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return super().change(p, group) + 0.01 * torch.randn_like(p)


class Holds(Each):
    """Is told anything."""

    def __init__(self, params: Iterable[Any], held: Any) -> None:
        super().__init__(params)
        self.held = held


class Around(Optimizer):
    """Steps another optimizer, as Lookahead and SAM do, and shares its groups."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.base = base
        self.param_groups = base.param_groups
        self.steps = 0

    def step(self) -> None:  # type: ignore[override]  # takes no closure
        self.base.step()
        self.steps += 1


Make = Callable[[list[nn.Parameter]], Optimizer]
SEPARATE: dict[str, Make] = {
    "Lion": Lion,
    "LARS": Lars,
    "around Lion": lambda params: Around(Lion(params)),
    "groups": lambda params: Each([{"params": params[:1]}, {"params": params[1:], "lr": 0.5}]),
    "a rate of 0": lambda params: Lion(params, lr=0.0),
    "a tensor as the rate": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
    "values": lambda params: Holds(params, {"betas": (0.9, None), "kind": torch.float32}),
}
COMBINED: dict[str, Make] = {
    "a norm over all": ClipsAll,
    "a distance": Distance,
    "around a norm": lambda params: Around(ClipsAll(params)),
    "a norm, and a rate of 0": lambda params: ClipsAll(params, lr=0.0),
    "several groups": lambda params: ClipsAll([{"params": [p]} for p in params]),
}
UNKNOWN: dict[str, Make] = {
    "noise": Noise,
    "around noise": lambda params: Around(Noise(params)),
    "a module": lambda params: Holds(params, nn.Linear(2, 2)),
    "a function": lambda params: Holds(params, lambda: params),
    "a tensor": lambda params: Holds(params, [torch.zeros(8)]),
    "no step": lambda params: Optimizer(params, {}),
}


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    shapes = [(5, 4), (5,), (1, 2, 3, 4), (), (5, 4)]
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]


@pytest.mark.parametrize("name", EACH_ALONE)
def test_of_torch(name: str) -> None:
    """The list of torch's optimizers is true."""
    kind = getattr(torch.optim, name)
    options = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    flat = [nn.Parameter(torch.ones(5, 4)) for _ in range(3)]
    optimizer = kind(flat if name == "Muon" else weights(), **options)
    assert steps_separately(optimizer)
    assert try_steps(optimizer) is True


@pytest.mark.parametrize("foreach", [True, False])
def test_for_each_or_not(foreach: bool) -> None:
    assert try_steps(torch.optim.Adam(weights(), amsgrad=True, foreach=foreach)) is True


@pytest.mark.parametrize(
    ("name", "make", "expected"),
    [
        *((name, make, True) for name, make in SEPARATE.items()),
        *((name, make, False) for name, make in COMBINED.items()),
        *((name, make, None) for name, make in UNKNOWN.items()),
    ],
)
def test_of_scripts(name: str, make: Make, expected: bool | None) -> None:
    assert try_steps(make(weights())) is expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_other_numbers(dtype: torch.dtype) -> None:
    assert try_steps(torch.optim.SGD(weights(dtype), momentum=0.9)) is True
    assert try_steps(ClipsAll(weights(dtype))) is False


def test_one_parameter_has_nothing_to_be_combined_with() -> None:
    assert try_steps(ClipsAll(weights()[:1])) is True
    assert try_steps(ClipsAll([{"params": weights()[:1]}, {"params": []}])) is True


def test_empty_parameters_are_left_out() -> None:
    empty = nn.Parameter(torch.ones(0, 4))
    assert try_steps(ClipsAll([empty, *weights()])) is False
    assert try_steps(Lion([empty, *weights()])) is True


def test_nothing_changes() -> None:
    """Also not with a scheduler, which replaces the optimizer's step, and after real steps."""
    params = weights()
    optimizer = Lion(params, lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 8)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    hooked: list[Optimizer] = []
    optimizer.register_step_pre_hook(lambda optimizer, *_: hooked.append(optimizer))
    anywhere = register_optimizer_step_pre_hook(lambda optimizer, *_: hooked.append(optimizer))

    def read() -> list[Any]:
        gradients = [p.grad for p in params]
        return [params, gradients, [optimizer.state[p]["exp_avg"] for p in params]]

    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    before, numbers = copy.deepcopy(read()), torch.get_rng_state()
    assert try_steps(optimizer) is True
    anywhere.remove()
    assert hooked == []
    assert torch.equal(torch.get_rng_state(), numbers)
    assert optimizer.param_groups == groups
    torch.testing.assert_close(read(), before, rtol=0.0, atol=0.0)
