"""Traps of skip connections across stages.

Each was measured on torchgpipe 0.0.7 itself; the first lines of a test say what happened there.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pipollux_hybrid import ConfigurationError, Namespace, pop, skippable, stash
from tests.hybrid.pipeline.trap_cases import (
    MODES,
    check_like_plain,
    engine,
    forward,
    fresh_context,  # noqa: F401  # a fixture, which pytest finds by its name
    wrap,
)


@skippable(stash=["long"])
class Stashes(nn.Module):
    """Linear, and its input for later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Iterator[object]:
        yield stash("long", x)
        return self.linear(x)


@skippable(pop=["long"])
class Pops(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        skipped = yield pop("long")
        return x * 2 + skipped


@skippable(stash=["long"])
class StashesPair(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        yield stash("long", (x, x))
        return x


class Doubles(nn.Module):
    """Stashes what it doubles."""

    def forward(self, x: Tensor) -> Iterator[object]:
        yield stash("long", x)
        return 2 * x


DoublesAndStashes = skippable(stash=["long"])(Doubles)


def with_skips() -> nn.Sequential:
    inner, outer = Namespace(), Namespace()
    return nn.Sequential(
        Stashes().isolate(outer),
        nn.Tanh(),
        DoublesAndStashes().isolate(inner),
        nn.Linear(4, 4),
        Pops().isolate(inner),
        nn.Tanh(),
        Pops().isolate(outer),
    )


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("balance", [[7], [1, 6], [2, 2, 3], [1, 1, 1, 1, 1, 1, 1]])
def test_skip_connections_across_stages(balance: list[int], checkpoint: str) -> None:
    check_like_plain(with_skips(), torch.randn(7, 4), 7, balance, checkpoint)


@pytest.mark.parametrize("checkpoint", MODES)
def test_skip_connections_of_layers_within_layers(checkpoint: str) -> None:
    # RuntimeError: 'long' has not been stashed.
    layers = list(with_skips())
    encoder, decoder = nn.Sequential(*layers[:3]), nn.Sequential(*layers[4:])
    module = nn.Sequential(encoder, layers[3], decoder)
    check_like_plain(module, torch.randn(7, 4), 7, [1, 1, 1], checkpoint)


def test_a_tuple_for_another_stage_is_refused() -> None:
    module = nn.Sequential(StashesPair(), nn.Linear(4, 4), Pops())
    with pytest.raises(TypeError, match="a layer stashes a tuple as 'long' for another stage"):
        forward(engine(module, [1, 2], "never"), torch.randn(7, 4), 7, 3)


def test_skippable_layers_pickle() -> None:
    # The decorator hid the class from pickle.
    module = with_skips()
    again = pickle.loads(pickle.dumps(module))  # noqa: S301  # what the line itself has pickled
    buffer = io.BytesIO()
    torch.save(module, buffer)
    inputs = torch.randn(3, 4)
    for twin in (again, copy.deepcopy(module)):
        assert isinstance(twin, nn.Sequential)
        torch.testing.assert_close(twin(inputs), module(inputs))


@skippable(stash=["mask"])
class StashesMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Iterator[object]:
        yield stash("mask", x > 0)
        return self.linear(x)


@skippable(pop=["mask"])
class PopsMask(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        mask = yield pop("mask")
        return x.masked_fill(mask, 0.0)


@skippable(stash=["mask"])
class StashesThreshold(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Iterator[object]:
        y = self.linear(x)
        yield stash("mask", y)
        return y


@skippable(pop=["mask"])
class ComparesOnly(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        threshold = yield pop("mask")
        return x * (x > threshold)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("pair", [(StashesMask, PopsMask), (StashesThreshold, ComparesOnly)])
def test_stashed_tensors_that_nothing_differentiates(
    pair: tuple[type[nn.Module], type[nn.Module]], checkpoint: str
) -> None:
    # AssertionError in the backward: no gradient came back through the portal.
    module = nn.Sequential(pair[0](), nn.Linear(4, 4), nn.Tanh(), pair[1]())
    check_like_plain(module, torch.randn(7, 4), 7, [1, 1, 1, 1], checkpoint)


def test_a_stash_without_a_pop_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no module declared 'long' as poppable"):
        wrap(nn.Sequential(Stashes(), nn.Tanh()))
