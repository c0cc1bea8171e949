"""A wrapped model stays what it was, or says at the next step that it is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from pipollux_hybrid import ConfigurationError, HybridParallel, save_all_states
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.optim.parameter_watch import LOOKED_AT


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_DIR", str(tmp_path))
    contexts.reset()
    yield tmp_path
    contexts.reset()


def wrapped(num_blocks: int = 2) -> tuple[nn.Sequential, torch.optim.Optimizer, HybridParallel]:
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(num_blocks)]
    module = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return module, optimizer, HybridParallel(module, optimizer)


def step(model: HybridParallel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 2)).square().mean().backward()
    optimizer.step()


def set_layer(module: nn.Sequential) -> None:
    module[1] = nn.Linear(2, 2)


def append_layer(module: nn.Sequential) -> None:
    module.append(nn.Linear(2, 2))


def drop_layer(module: nn.Sequential) -> None:
    del module[1]


def set_inner_layer(module: nn.Sequential) -> None:
    inner = module[0]
    assert isinstance(inner, nn.Sequential)
    inner[0] = nn.Linear(2, 2)


def set_parameter(module: nn.Sequential) -> None:
    module.get_submodule("0.0").weight = nn.Parameter(torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (set_layer, "layer '1' was a Sequential when the module was wrapped and is another Linear"),
        (append_layer, "the module had 2 layers when it was wrapped and has 3 now"),
        (drop_layer, "the module had 2 layers when it was wrapped and has 1 now"),
        (set_inner_layer, r"layer '0' \(Sequential\) has other parameters or submodules"),
        (set_parameter, r"layer '0\.0' \(Linear\) has other parameters or submodules"),
    ],
)
def test_a_model_that_is_changed_is_refused_at_the_next_step(
    change: Callable[[nn.Sequential], None], sentence: str
) -> None:
    module, optimizer, model = wrapped()
    step(model, optimizer)
    change(module)
    with pytest.raises(ConfigurationError, match=sentence):
        step(model, optimizer)


def test_a_large_model_is_gone_through_in_some_steps() -> None:
    module, optimizer, model = wrapped(num_blocks=LOOKED_AT)
    module.get_submodule(f"{LOOKED_AT - 1}.0").weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ConfigurationError, match=f"layer '{LOOKED_AT - 1}.0'"):  # noqa: PT012  # one of several steps
        for _ in range(4):
            step(model, optimizer)


def test_the_optimizer_is_given_a_foreign_parameter() -> None:
    _, optimizer, model = wrapped()
    foreign = nn.Parameter(torch.zeros(3))
    refused = r"was given a parameter of shape \(3,\) that is not in the wrapped module"
    for given in (foreign, [foreign], iter([("named", foreign)])):
        with pytest.raises(ConfigurationError, match=refused):
            optimizer.add_param_group({"params": given})
    step(model, optimizer)
    optimizer.param_groups[0]["params"].append(foreign)
    with pytest.raises(ConfigurationError, match=refused):
        step(model, optimizer)
    # And where there is no further step, at the save: never a bare KeyError.
    with pytest.raises(Exception, match=refused):
        save_all_states()


def test_parameters_of_the_module_may_be_added_later() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    optimizer = torch.optim.SGD(module[1].parameters(), lr=0.1)
    model = HybridParallel(module, optimizer)
    step(model, optimizer)
    frozen = module[0].weight.detach().clone()
    module[0].requires_grad_(True)
    optimizer.add_param_group({"params": module[0].parameters()})
    step(model, optimizer)
    assert not torch.equal(module[0].weight, frozen)
    assert len(optimizer.param_groups) == 2
