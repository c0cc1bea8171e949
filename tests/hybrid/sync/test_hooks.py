"""Hooks of the script in a backward: those that train there are refused, others are called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import HybridParallel, SynchronizationError, init_process_group
from pipollux_hybrid.job.context import context
from tests.hybrid.models import assert_close, gradients, make_data, make_model
from tests.hybrid.pipeline.trap_cases import (
    fresh_context,  # noqa: F401  # a fixture, which pytest finds by its name
    wrap,
)
from tests.hybrid.stage_processes.training import run_stages

INPUTS, TARGETS = make_data("mlp", 8).tensors


def steps_and_forgets(module: nn.Module) -> None:
    """The recipe for an optimizer in the backward."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in module.parameters()}

    def step(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def changes_data(module: nn.Module) -> None:
    """A step that PyTorch counts no change of."""

    def change(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.sub_(parameter.grad)

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(change)


def forgets(module: nn.Module) -> None:
    def forget(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(forget)


def steps_the_ones_before(module: nn.Module) -> None:
    """Each gradient's hook steps those parameters whose gradients are there already."""

    def hook(gradient: Tensor) -> Tensor:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad)
                parameter.grad = None
        return gradient

    for parameter in module.parameters():
        parameter.register_hook(hook)


REFUSED: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "step": (steps_and_forgets, r"a hook on parameter '\d.\w+' changed it in the backward"),
    "data": (changes_data, r"a hook on parameter '\d.\w+' changed it in the backward"),
    "forget": (forgets, r"a hook on parameter '\d.\w+' removed its gradient in the backward"),
    "others": (steps_the_ones_before, r"a hook on parameter '\d.\w+' changed it in the backward"),
}


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("name", list(REFUSED))
def test_hooks_that_train(name: str, mode: str) -> None:
    module = make_model("mlp")
    model = wrap(module, num_stages=2, num_microbatches=4, activation_checkpoint=mode)
    register, said = REFUSED[name]
    register(module)
    with pytest.raises(SynchronizationError, match=said):
        F.cross_entropy(model(INPUTS), TARGETS).backward()


def test_the_optimizer_stepped_by_a_hook_of_a_layer() -> None:
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=4)
    module[4].register_full_backward_hook(lambda *_: optimizer.step())
    with pytest.raises(SynchronizationError, match=r"optimizer.step\(\) was called by a hook"):
        F.cross_entropy(model(INPUTS), TARGETS).backward()


def clamps(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1e-3, 1e-3)


def clamps_in_place(gradient: Tensor) -> None:
    gradient.clamp_(-1e-3, 1e-3)


def adds(gradient: Tensor) -> Tensor:
    return gradient + 0.1


@pytest.mark.parametrize("hook", [clamps, clamps_in_place, adds])
def test_hooks_that_need_the_whole_gradient(hook: Callable[[Tensor], Tensor | None]) -> None:
    module = make_model("mlp")
    model = wrap(module, num_stages=2, num_microbatches=4, activation_checkpoint="always")
    module[4].weight.register_hook(hook)
    with pytest.raises(SynchronizationError, match=r"'4.weight' returns a gradient that is not"):
        F.cross_entropy(model(INPUTS), TARGETS).backward()


@pytest.mark.parametrize(
    ("hook", "mode"), [(lambda g: g * torch.arange(g.shape[-1]), "always"), (clamps, "never")]
)
def test_hooks_that_give_what_they_give_the_plain_model(
    hook: Callable[[Tensor], Tensor], mode: str
) -> None:
    """A mask in any mode; anything where a parameter receives one gradient for the whole batch."""
    module, plain = make_model("mlp"), make_model("mlp")
    model = wrap(module, num_stages=2, num_microbatches=4, activation_checkpoint=mode)
    for layers in (module, plain):
        layers[4].weight.register_hook(hook)
    F.cross_entropy(model(INPUTS), TARGETS).backward()
    F.cross_entropy(plain(INPUTS), TARGETS).backward()
    assert_close(gradients(module), gradients(plain), 1e-12)


def test_hooks_that_look_on() -> None:
    module, seen = make_model("mlp"), []
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: seen.append(gradient))
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter))
    model = wrap(module, num_stages=2, num_microbatches=4, activation_checkpoint="always")
    for _ in range(2):
        F.cross_entropy(model(INPUTS), TARGETS).backward()
    count = len(list(module.parameters()))
    assert len(seen) == 2 * 2 * 4 * count
    assert all(len(p._backward_hooks or ()) == 1 for p in module.parameters())


def step_in_processes() -> str:
    init_process_group("gloo", timeout=60.0)
    module = make_model("mlp")
    model = wrap(module, num_stages=context().env.processes_per_replica, num_microbatches=4)
    steps_and_forgets(module)
    try:
        model.train_step(INPUTS, TARGETS, F.cross_entropy)
    except SynchronizationError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("num_replicas", "num_stages"), [(2, 1), (1, 2)])
def test_hooks_that_train_in_several_processes(num_replicas: int, num_stages: int) -> None:
    found = [x for row in run_stages(step_in_processes, num_replicas, num_stages) for x in row]
    assert "nothing" not in found
    assert any("a hook on parameter" in text for text in found), found
