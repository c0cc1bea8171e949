"""A script whose plain loader gives every replica the same samples is told so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from pipollux_hybrid import (
    AdaptiveDataLoader,
    HybridParallel,
    init_process_group,
    num_replicas,
    replica_rank,
)
from pipollux_hybrid.job import context as contexts
from tests.hybrid.models import make_data, make_model
from tests.hybrid.replicas import run_replicas


class Share(IterableDataset[tuple[Tensor, ...]]):
    """Every other sample, by rank."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for index in range(replica_rank(), len(self.data), num_replicas()):
            yield self.data[index]


LOADERS = {
    "plain": lambda data: DataLoader(data, batch_size=4),
    "shuffled": lambda data: DataLoader(data, batch_size=4, shuffle=True),
    "DistributedSampler": lambda data: DataLoader(
        data, batch_size=4, sampler=DistributedSampler(data, 2, replica_rank())
    ),
    "iterable": lambda data: DataLoader(Share(data), batch_size=4),
    "adaptive": lambda data: AdaptiveDataLoader(data, batch_size=4),
}


def warnings_of(name: str) -> list[str]:
    """What a training loop over such a loader is told."""
    contexts.reset()
    torch.manual_seed(1)
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = LOADERS[name](make_data("mlp", 16))
    model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    assert all(warning.filename == __file__ for warning in caught), "it names the script's line"
    return [str(warning.message) for warning in caught]


def all_warnings() -> dict[str, list[str]]:
    init_process_group("gloo")
    return {name: warnings_of(name) for name in LOADERS}


def test_the_same_samples_on_all_replicas_are_told_once() -> None:
    first, second = run_replicas(all_warnings, 2)
    for name in ("plain", "shuffled"):
        [sentence] = first.pop(name)
        assert "all 2 replicas train on the same samples" in sentence
        assert "pipollux.AdaptiveDataLoader" in sentence
    assert not any(first.values())
    assert not any(second.values()), "only replica 0 warns"
