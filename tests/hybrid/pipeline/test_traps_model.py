"""Traps of the model as a whole: its names, cut, moves, compilation and evaluation.

Each was measured on torchgpipe 0.0.7 itself; the first lines of a test say what happened there.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import ConfigurationError
from pipollux_hybrid.job import context as contexts
from pipollux_perfmodel import partition
from tests.extent import first
from tests.hybrid.models import assert_close, gradients, make_data, make_model
from tests.hybrid.pipeline.trap_cases import (
    MODES,
    CountsForwards,
    check_like_plain,
    fresh_context,  # noqa: F401  # a fixture, which pytest finds by its name
    wrap,
)


def test_state_dict_keys_do_not_change_with_the_balance() -> None:
    # partitions.{stage}.{name}: another balance, other keys.
    module = make_model("mlp")
    keys = list(module.state_dict())
    for balance in ([4, 5], [1, 8], [3, 3, 3]):
        contexts.reset()
        model = wrap(module, balance=balance)
        assert list(model.state_dict()) == keys
        plain = make_model("mlp")
        plain.load_state_dict(model.state_dict())
        model.load_state_dict(plain.state_dict())


class TiedHead(nn.Module):
    """Scores by the embedding's own weights."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@pytest.mark.parametrize("checkpoint", MODES)
def test_layers_that_share_a_parameter(checkpoint: str) -> None:
    # Gradients of one copy were lost where stages had devices of their own.
    embedding = nn.Embedding(9, 4)
    module = nn.Sequential(nn.Identity(), embedding, nn.Tanh(), TiedHead(embedding), nn.Tanh())
    check_like_plain(module, torch.randint(9, (7,)), 7, [1, 3, 1], checkpoint)
    with pytest.raises(ConfigurationError, match=r"'1.weight'.*'3.weight'|'3.*'.*'1.*'"):
        wrap(module, balance=[3, 2])
    assert wrap(module, num_stages=2).balance in ([1, 4], [4, 1])


def test_the_cut_is_the_best_contiguous_one() -> None:
    # Its balancer's slowest stage is up to 1.57 times as slow as the best cut's.
    costs = [1.0, 9.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0]
    balance = partition(costs, 3)
    ends = [sum(balance[: k + 1]) for k in range(3)]
    slowest = max(sum(costs[end - n : end]) for end, n in zip(ends, balance, strict=True))
    assert slowest == 11.0


def test_modules_that_would_not_be_run_as_they_are() -> None:
    class OwnForward(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(ConfigurationError, match=r"OwnForward is no plain nn.Sequential"):
        wrap(OwnForward(nn.Linear(2, 2)))
    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigurationError, match=r"module has hooks"):
        wrap(hooked)


def test_a_wrapped_model_is_not_moved() -> None:
    # Layers would leave their stages' devices one and all.
    model = wrap(make_model("mlp"), num_stages=2)
    to = model.to
    for move in (model.cpu, model.cuda, lambda: to("cpu"), lambda: to(device="cpu"), lambda: to(0)):
        with pytest.raises(ConfigurationError, match=r"each stage has its own device"):
            move()
    assert next(model.to(torch.float32).parameters()).dtype == torch.float32


# torch.compile itself looks at the gradients of inputs, in a plain nn.Sequential as well.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("checkpoint", first(1, MODES))
def test_compiled_layers_keep_their_names_and_gradients(checkpoint: str) -> None:
    # torch.compile puts _orig_mod into the keys of what it wraps.
    module = make_model("mlp", torch.float32)
    plain = copy.deepcopy(module)
    for i in (0, 4, 6):
        module[i] = torch.compile(module[i], backend="aot_eager")
    module[2].compile(backend="aot_eager")
    model = wrap(module, balance=[4, 5], num_microbatches=3, activation_checkpoint=checkpoint)
    assert list(model.state_dict()) == list(plain.state_dict())
    inputs, targets = make_data("mlp", 7, torch.float32)[list(range(7))]
    F.cross_entropy(model(inputs), targets).backward()
    F.cross_entropy(plain(inputs), targets).backward()
    ours = {n.replace("_orig_mod.", ""): g for n, g in gradients(module).items()}
    assert_close(ours, gradients(plain), 1e-6)
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())


@pytest.mark.parametrize("checkpoint", MODES)
def test_evaluation_is_the_plain_models(checkpoint: str) -> None:
    # Training mode under no_grad recomputed what nobody would ask for.
    layer = CountsForwards()
    module = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), layer, nn.BatchNorm1d(3))
    plain = copy.deepcopy(module)
    model = wrap(module, num_stages=2, num_microbatches=3, activation_checkpoint=checkpoint)
    inputs = torch.randn(9, 4)
    model.eval()
    plain.eval()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            torch.testing.assert_close(model(inputs), plain(inputs))
    assert layer.all == 9
    model.train()
    with torch.no_grad():
        assert not model(inputs).requires_grad
    assert layer.all == 12
    assert layer.with_gradients == 3


def test_a_second_model_in_a_process_is_refused() -> None:
    # "a state named 'model.pt' exists already".
    wrap(make_model("mlp"))
    with pytest.raises(ConfigurationError, match=r"a job has one pipeline"):
        wrap(make_model("mlp"))
