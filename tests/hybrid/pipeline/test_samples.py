"""Parts of a batch that do not belong to its samples: what is refused, and what is not."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import ConfigurationError, HybridParallel, per_sample, profile_layers, whole
from pipollux_hybrid.pipeline.samples import BatchCheck
from tests.hybrid.pipeline.trap_cases import (
    fresh_context,  # noqa: F401  # a fixture, which pytest finds by its name
    wrap,
)

SIZE = 6


class TakesFirst(nn.Module):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        hidden: Tensor = batch["x"]
        return hidden


def model() -> HybridParallel:
    module = nn.Sequential(TakesFirst(), nn.Linear(SIZE, 4))
    return wrap(module, num_stages=2, num_microbatches=3)


def x(size: int = SIZE) -> Tensor:
    return torch.randn(size, SIZE)


CAUSAL = torch.ones(SIZE, SIZE).triu(1)
REFUSED: dict[str, tuple[Any, str]] = {
    "strings": (["a"] * SIZE, r"inputs\['more'\] is a list of 6 items, and the batch has 6"),
    "nested": ({"names": ("a",) * SIZE}, r"inputs\['more'\]\['names'\] is a tuple of 6 items"),
    "bool mask": (CAUSAL.bool(), r"inputs\['more'\] is a causal mask"),
    "mask of zeros and infinity": (torch.full_like(CAUSAL, -torch.inf).triu(1), "a causal mask"),
    "mask of the past": (torch.ones(SIZE, SIZE).tril(), "is a causal mask, .* pipollux.whole"),
    "positions": (torch.arange(SIZE), r"inputs\['more'\] is positions"),
    "one row": (torch.ones(1, SIZE), r"different size \(\(6, 6\), \(1, 6\)\).* pipollux.whole"),
    "a scalar": (torch.tensor(3.0), r"a scalar in the inputs.* pipollux.whole"),
    "too few items": (per_sample(["a"] * 5), r"different size \(\(6, 6\), 5 items\)"),
}
ALLOWED: dict[str, Any] = {
    "strings": per_sample(["a"] * SIZE),
    "all strings": whole(["a"] * SIZE),
    "other strings": ["a"] * (SIZE + 1),
    "mask": whole(CAUSAL),
    "no mask": per_sample(CAUSAL),
    "scalar": whole(torch.tensor(3.0)),
    "size": torch.Size([SIZE] * SIZE),
    "rows": [torch.ones(SIZE, 1), None],
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(name: str) -> None:
    more, said = REFUSED[name]
    with pytest.raises(ConfigurationError, match=said):
        model()({"x": x(), "more": more})


@pytest.mark.parametrize("name", list(ALLOWED))
def test_allowed(name: str) -> None:
    assert model()({"x": x(), "more": ALLOWED[name]}).shape == (SIZE, 4)


def test_one_micro_batch_is_the_plain_model() -> None:
    pipeline = model()
    pipeline.num_microbatches = 1
    pipeline({"x": x(), "more": ["a"] * SIZE, "mask": CAUSAL})


def test_a_list_of_another_length_than_the_batch_once() -> None:
    """As the last batch of an epoch may have as many samples as any list has items."""
    pipeline = model()
    for size in (SIZE, 2):
        pipeline({"x": x(size), "shape": (8, 8)})


def test_a_tensor_that_comes_again_with_other_samples() -> None:
    """A mask or weights made once, as long as the batch by chance."""
    pipeline, mask, ones = model(), torch.rand(SIZE, SIZE), torch.ones(SIZE, 2)
    pipeline({"x": x(), "ones": ones, "mask": mask})
    with pytest.raises(ConfigurationError, match=r"\['mask'\] is the very tensor that came with"):
        pipeline({"x": x(), "ones": ones, "mask": mask})


def test_the_same_batch_again() -> None:
    pipeline, batch = model(), {"x": x(), "mask": torch.rand(SIZE, SIZE)}
    for _ in range(2):
        pipeline(batch)


def test_class_weights_as_long_as_the_batch() -> None:
    check, weights = BatchCheck("targets"), torch.rand(SIZE)
    check.check((torch.arange(SIZE), weights), SIZE, 3)
    with pytest.raises(ConfigurationError, match=r"targets\[1\] is the very tensor"):
        check.check((torch.arange(SIZE), weights), SIZE, 3)


def test_targets_in_one_process_are_whole() -> None:
    """The loss is of the whole batch, so that nothing is cut, and marks are taken off."""
    found = []

    def loss_fn(output: Tensor, targets: dict[str, Any]) -> Tensor:
        found.append(targets["names"])
        return F.mse_loss(output, targets["y"])

    targets = OrderedDict(names=per_sample(["a"] * SIZE), y=torch.zeros(SIZE, 4))
    model().train_step({"x": x()}, targets, loss_fn)
    assert found == [["a"] * SIZE]


def test_what_is_no_sequence_has_no_samples() -> None:
    with pytest.raises(ConfigurationError, match=r"per_sample\(…\) got a dict: a list, a tuple"):
        per_sample({})


class NeedsAll(nn.Module):
    """Takes a mask of all columns and a text for each row."""

    def forward(self, batch: dict[str, Any]) -> Tensor:
        hidden: Tensor = batch["x"] + batch["mask"]
        assert len(batch["texts"]) == len(hidden)
        return hidden


def test_layers_are_profiled_with_marked_inputs() -> None:
    inputs = {"x": x(), "mask": whole(torch.rand(SIZE)), "texts": per_sample(["a"] * SIZE)}
    profile = profile_layers(nn.Sequential(NeedsAll(), nn.Linear(SIZE, 4)), inputs, rounds=1)
    assert len(profile.layers) == 2
