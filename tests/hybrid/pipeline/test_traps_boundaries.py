"""Traps of what goes from stage to stage, and into and out of the pipeline.

Each was measured on torchgpipe 0.0.7 itself; the first lines of a test say what happened there.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipollux_hybrid import ConfigurationError
from tests.hybrid.pipeline.trap_cases import (
    MODES,
    check_like_plain,
    engine,
    forward,
    fresh_context,  # noqa: F401  # a fixture, which pytest finds by its name
    wrap,
)


class TakesMask(nn.Module):
    """(hidden, mask, ids) to the same; uses all three."""

    def __init__(self, mask_first: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask_first = mask_first

    def forward(self, value: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        mask, x, ids = value if self.mask_first else (value[1], value[0], value[2])
        y = self.linear(x).masked_fill(mask, 0.0) + ids.unsqueeze(1)
        return (mask, y, ids + 1) if self.mask_first else (y, mask, ids + 1)


class Picks(nn.Module):
    """One of a tuple's tensors."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def forward(self, value: tuple[Tensor, ...]) -> Tensor:
        return value[self.place]


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("mask_first", [False, True])
def test_integer_and_boolean_tensors_between_stages(checkpoint: str, mask_first: bool) -> None:
    # RuntimeError or IndexError from inside autograd, where activations are recomputed.
    module = nn.Sequential(
        TakesMask(mask_first), TakesMask(mask_first), TakesMask(mask_first), Picks(int(mask_first))
    )
    x, mask, ids = torch.randn(7, 4), torch.rand(7, 4) < 0.3, torch.arange(7)
    inputs = (mask, x, ids) if mask_first else (x, mask, ids)
    check_like_plain(module, inputs, 7, [1, 1, 2], checkpoint)


class PassesOn(nn.Module):
    """Nothing at all; its output may be all integers."""

    def forward(self, value: object) -> object:
        return value


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_boundary_of_integers_only(checkpoint: str) -> None:
    module = nn.Sequential(PassesOn(), nn.Embedding(9, 4), nn.Linear(4, 2))
    check_like_plain(module, torch.arange(7), 7, [1, 1, 1], checkpoint)


class FloatMask(nn.Module):
    """Gives a mask that nothing differentiates, ahead of what is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x > 0).float(), self.linear(x)


class AppliesMask(nn.Module):
    """The other end of it."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        mask, x = value
        return x * mask.detach()


@pytest.mark.parametrize("checkpoint", MODES)
def test_floating_tensors_between_stages_that_need_no_gradient(checkpoint: str) -> None:
    module = nn.Sequential(FloatMask(), PassesOn(), AppliesMask(), nn.Linear(4, 2))
    check_like_plain(module, torch.randn(7, 4), 7, [1, 1, 2], checkpoint)


class FromDict(nn.Module):
    """Takes and gives dicts with lists, numbers and None in them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: dict[str, object]) -> dict[str, object]:
        hidden, rest, scale = value["hidden"], value["rest"], value["scale"]
        assert isinstance(hidden, Tensor)
        assert isinstance(rest, list)
        assert isinstance(scale, int)
        return {
            "hidden": self.linear(hidden) * scale + rest[0],
            "rest": [rest[0] + 1, None],
            "scale": scale,
        }


class ToTensor(nn.Module):
    def forward(self, value: dict[str, Tensor]) -> Tensor:
        return value["hidden"]


@pytest.mark.parametrize("checkpoint", MODES)
def test_nests_of_tensors_between_stages(checkpoint: str) -> None:
    module = nn.Sequential(FromDict(), FromDict(), ToTensor())
    inputs = {"hidden": torch.randn(5, 4), "rest": [torch.ones(5, 1), None], "scale": 3}
    check_like_plain(module, inputs, 5, [1, 1, 1], checkpoint)


def test_what_is_no_tensor_is_refused_by_layer() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].register_forward_hook(lambda *_: object())
    with pytest.raises(
        ConfigurationError, match=r"output of stage 0, layer '0', is or holds a object"
    ):
        forward(engine(module, [1, 1], "always"), torch.randn(4, 4), 4, 2)


def test_tuples_whose_first_dimensions_differ() -> None:
    # Rows were dropped silently.
    model = wrap(nn.Sequential(Picks(0), nn.Linear(4, 4)))
    with pytest.raises(ConfigurationError, match=r"different size \(\(6, 4\), \(5, 4\)\)"):
        model(torch.randn(6, 4), torch.randn(5, 4))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def test_scalars_cannot_be_gathered() -> None:
    # RuntimeError: zero-dimensional tensor cannot be concatenated.
    pipeline = engine(nn.Sequential(nn.Linear(4, 4), Mean()), [1, 1], "never")
    with pytest.raises(ConfigurationError, match=r"returned a scalar.* one value per sample"):
        forward(pipeline, torch.randn(4, 4), 4, 2)


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.t()


def test_outputs_without_the_batch_in_front() -> None:
    # Rows of different samples were put below each other.
    pipeline = engine(nn.Sequential(nn.Linear(4, 4), Transposed()), [1, 1], "never")
    with pytest.raises(ConfigurationError, match=r"dimension 0 must be the batch"):
        forward(pipeline, torch.randn(5, 4), 5, 2)


class Masked(nn.Module):
    """(x, float mask) to (linear x, the very same mask)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = value
        return self.linear(x * mask), mask


class OwnBuffer(nn.Module):
    """Gives a buffer of its own along with its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("ones", torch.ones(1, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.ones


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("balance", [[4], [1, 3], [1, 1, 2]])
def test_a_float_input_handed_on_unchanged(balance: list[int], checkpoint: str) -> None:
    # The caller's tensor became part of the graph, and the recomputation ran into itself.
    module = nn.Sequential(Masked(), Masked(), Masked(), Picks(0))
    mask = torch.rand(8, 4)
    check_like_plain(module, (torch.randn(8, 4), mask), 8, balance, checkpoint, 4)
    assert mask.is_leaf
    assert not mask.requires_grad


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_buffer_handed_out_stays_a_buffer(checkpoint: str) -> None:
    layer = OwnBuffer()
    module = nn.Sequential(layer, Masked(), Picks(0))
    for _ in range(2):
        check_like_plain(module, torch.randn(4, 4), 4, [1, 2], checkpoint, 2)
        module.zero_grad()
        assert layer.ones.is_leaf
        assert not layer.ones.requires_grad
