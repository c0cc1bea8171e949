"""Data that each replica has sharded already is refused, as loaders divide it themselves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DistributedSampler, IterableDataset, Subset, TensorDataset

from pipollux_hybrid import (
    AdaptiveDataLoader,
    ConfigurationError,
    HybridParallel,
    SynchronizationError,
    init_process_group,
    num_replicas,
    replica_rank,
)
from pipollux_hybrid.job import context as contexts
from tests.hybrid.models import make_data, make_model
from tests.hybrid.replicas import run_replicas

DATA = make_data("mlp", 48)


class Stream(IterableDataset[Any]):
    """A stream of samples, each as a function gives it.

    Args:
        sharded: Whether it gives this replica's share only.
        give: What it makes of inputs and target.
    """

    def __init__(self, sharded: bool, give: Callable[[Tensor, Tensor], Any]) -> None:
        self.sharded, self.give = sharded, give

    def __iter__(self) -> Iterator[Any]:
        first, step = (replica_rank(), num_replicas()) if self.sharded else (0, 1)
        for index in range(first, len(DATA), step):
            yield self.give(*DATA[index])


def pair(inputs: Tensor, target: Tensor) -> Any:
    return inputs, target


def turned(inputs: Tensor, target: Tensor) -> Any:
    return inputs + torch.randn(inputs.shape), target


def tokens(inputs: Tensor, target: Tensor) -> Any:
    """Eight integers, of which one is masked at random."""
    ids = (inputs[:1] * 1e6).long() % 9973 + torch.arange(8) * 1000
    ids[torch.randint(8, ())] = 0
    return {"ids": ids, "labels": target.expand(2)}


def reals(inputs: Tensor, target: Tensor) -> Any:  # there is no label
    return inputs


def loop(dataset: Any, **options: Any) -> list[str]:
    """Train until something is said; return warnings."""
    contexts.reset()
    torch.manual_seed(1 + replica_rank())
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = AdaptiveDataLoader(dataset, batch_size=8, **options)
    model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            optimizer.zero_grad()
            # Only which samples come is of interest, not what the model makes of them.
            count = len(pytree.tree_leaves(batch)[0])
            inputs = DATA.tensors[0][:count]
            F.cross_entropy(model(inputs), DATA.tensors[1][: len(inputs)]).backward()
            optimizer.step()
            assert context_steps() <= 6
    return [str(warning.message) for warning in caught]


def context_steps() -> int:
    return contexts.context().step or 0


STREAMS: dict[str, Callable[[], Any]] = {
    "whole": lambda: Stream(False, pair),
    "sharded": lambda: Stream(True, pair),
    "turned": lambda: Stream(False, turned),
    "turned and sharded": lambda: Stream(True, turned),
    "masked": lambda: Stream(False, tokens),
    "masked and sharded": lambda: Stream(True, tokens),
    "reals": lambda: Stream(False, reals),
    "sharded reals": lambda: Stream(True, reals),
    "tensors": lambda: DATA,
    "sharded tensors": lambda: TensorDataset(*(x[replica_rank() :: 2] for x in DATA.tensors)),
    "subset": lambda: Subset(DATA, range(0, 48, 2)),
    "sharded subset": lambda: Subset(DATA, range(replica_rank(), 48, 2)),
}


def said_of_all() -> dict[str, tuple[str, int, list[str]]]:
    init_process_group("gloo", timeout=60.0)
    found = {}
    for name, make in STREAMS.items():
        text, caught = "nothing", []
        try:
            caught = loop(make())
        except SynchronizationError as error:
            text = str(error)
        found[name] = text, context_steps(), caught
    return found


def test_sharded_data_is_refused_before_the_first_step() -> None:
    num_warnings = 0
    for said in run_replicas(said_of_all, 2):
        for name in ("whole", "turned", "masked", "reals", "tensors", "subset"):
            text, steps, caught = said.pop(name)
            assert (text, caught) == ("nothing", []), name
            assert steps > 0
        text, _, caught = said.pop("sharded reals")
        assert text == "nothing"
        assert all("if it is sharded by rank, most samples are lost" in warned for warned in caught)
        num_warnings += len(caught)
        for name in ("sharded", "turned and sharded", "masked and sharded"):
            text, steps, _ = said.pop(name)
            assert "read different samples from the iterable data set" in text, name
            assert steps == 0, name
        for name, (text, steps, _) in said.items():
            assert "not sharded by hand" in text, name
            assert steps == 0, name
    assert num_warnings == 1, "replica 0 warns, once"


def test_a_sampler_of_ranks_is_refused() -> None:
    sampler = DistributedSampler(DATA, 2, 0)
    with pytest.raises(ConfigurationError, match="leave out a DistributedSampler"):
        AdaptiveDataLoader(DATA, batch_size=8, sampler=sampler)
