"""Tensors that another stage has loaded: sizes go on through a loop's body, values are refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.pipeline.microbatch import batch_size_of, scatter
from pipollux_hybrid.pipeline.unloaded import Unloaded, is_loaded

CPU = torch.device("cpu")
LOADED = torch.randn(4, 3)
PARAMETER = torch.randn(4, 3, requires_grad=True)
SIZES: dict[str, Callable[[Any, Any], Any]] = {
    "slice": lambda x, _: x[:, 1:],
    "view": lambda x, _: x.permute(1, 0).contiguous().view(2, -1),
    "index": lambda x, _: x[torch.tensor([3, 1])],
    "arithmetic": lambda x, _: 2 * x / 255 - 1,
    "with a loaded tensor": lambda _, y: (LOADED.argmax(1) == y).sum(),
    "moved": lambda x, _: x.to("cpu", torch.float64),
    "to the type of another": lambda x, y: x.to(y),
    "in place": lambda x, _: x.mul_(2).clamp_(0, 1),
    "loss without a graph": lambda _, y: F.cross_entropy(LOADED, y),
    "one-hot": lambda _, y: F.one_hot(y, 5),
    "several": lambda x, _: torch.cat(x.split([1, 3])),
    "rows": lambda x, _: torch.stack(list(x)),
    "filled": lambda x, _: torch.zeros_like(x),
    "copied": lambda x, _: copy.deepcopy(x),
}
REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "item": lambda x, _: x.sum().item(),
    "float": lambda x, _: float(x.sum()),
    "bool": lambda x, _: bool((x > 0).any()),
    "tolist": lambda x, _: x.tolist(),
    "numpy": lambda x, _: x.numpy(),
    "array": lambda x, _: np.asarray(x),
    "mask": lambda x, y: x[y > 0],
    "mask of a loaded tensor": lambda _, y: LOADED[y > 0],
    "nonzero": lambda _, y: y.nonzero(),
    "unique": lambda _, y: y.unique(),
    "equal": lambda x, _: torch.equal(x, x),
    "random": lambda x, _: torch.rand_like(x),
    "dropout": lambda x, _: F.dropout(x),
    "random in place": lambda x, _: x.normal_(),
    "added to a loaded tensor": lambda x, _: torch.zeros(()).add_(x.sum()),
    "put into a loaded tensor": lambda _, y: LOADED.index_add_(0, y, torch.ones(4, 3)),
    "set in a loaded tensor": lambda _, y: LOADED.__setitem__(y, 0.0),
    "out": lambda x, _: torch.add(x, x, out=torch.zeros(4, 8)),
    "gradients": lambda _, y: F.cross_entropy(PARAMETER, y),
    "pickle": lambda x, _: pickle.dumps(x),
}


def unloaded(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return Unloaded(torch.empty(size, dtype=dtype, device="meta"), CPU)


@pytest.mark.parametrize("name", list(SIZES))
def test_results_are_unloaded_and_of_the_same_size(name: str) -> None:
    function = SIZES[name]
    found = function(unloaded(4, 8), unloaded(4, dtype=torch.int64))
    expected = function(torch.rand(4, 8), torch.tensor([1, 0, 2, 1]))
    assert isinstance(found, Unloaded)
    assert not is_loaded({"found": [found]})
    seen = [(x.shape, x.dtype, x.device, x.stride(), len(x.shape)) for x in (found, expected)]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", list(REFUSED))
def test_values_and_effects_on_loaded_tensors_are_refused(name: str) -> None:
    before, generator = LOADED.clone(), torch.get_rng_state()
    with pytest.raises(ConfigurationError, match="a part of the batch that this process has not"):
        REFUSED[name](unloaded(4, 8), unloaded(4, dtype=torch.int64))
    assert torch.equal(LOADED, before)
    assert PARAMETER.grad is None
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_batch_can_be_printed_and_cut() -> None:
    batch = [unloaded(4, 8), {"labels": unloaded(4, dtype=torch.int64)}]
    assert "loaded by another stage, size=(4, 8)" in str(batch)
    assert batch_size_of(batch) == len(batch[0]) == 4
    assert [part[0].shape[0] for part in scatter(batch, [3, 1])] == [3, 1]
