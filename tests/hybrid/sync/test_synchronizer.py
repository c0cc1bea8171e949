"""Gradient synchronisation where torch's own falls short or a loop does the unusual."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import (
    ConfigurationError,
    HybridParallel,
    SynchronizationError,
    init_process_group,
    replica_rank,
)
from tests.extent import first
from tests.hybrid.models import assert_close, gradients, make_data, make_model
from tests.hybrid.replicas import run_replicas

BATCH = 8


def share_of(rank: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """Half a batch for each of two replicas."""
    start = step * BATCH + rank * BATCH // 2
    inputs, targets = make_data("mlp", 64)[list(range(start, start + BATCH // 2))]
    return inputs, targets


def whole(step: int = 0) -> tuple[Tensor, Tensor]:
    inputs, targets = make_data("mlp", 64)[list(range(step * BATCH, (step + 1) * BATCH))]
    return inputs, targets


def wrap(module: nn.Sequential, **options: object) -> tuple[HybridParallel, torch.optim.Optimizer]:
    init_process_group("gloo")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return HybridParallel(module, optimizer, **options), optimizer


def change_microbatches(checkpoint: str) -> list[dict[str, Tensor]]:
    module = make_model("mlp")
    model, optimizer = wrap(module, num_stages=2, activation_checkpoint=checkpoint)
    history = []
    for step, num_microbatches in enumerate([2, 4, 1, 3]):
        model.num_microbatches = num_microbatches
        inputs, targets = share_of(replica_rank(), step)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        history.append(gradients(module))
        optimizer.step()
    return history


@pytest.mark.parametrize("checkpoint", first(1, ["except_last", "always", "never"]))
def test_micro_batches_change_from_step_to_step(checkpoint: str) -> None:
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    expected = []
    for step in range(4):
        inputs, targets = whole(step)
        optimizer.zero_grad()
        F.cross_entropy(module(inputs), targets).backward()
        expected.append(gradients(module))
        optimizer.step()
    for history in run_replicas(change_microbatches, 2, checkpoint):
        for ours, theirs in zip(history, expected, strict=True):
            assert_close(ours, theirs, 1e-12)


class TwoHeads(nn.Module):
    """Uses its second layer only where told to, and its third never."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(6, 3)
        self.sometimes = nn.Linear(6, 3)
        self.never = nn.Linear(6, 3)
        self.both = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.always(x)
        return y + self.sometimes(x) if self.both else y


def two_heads() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), TwoHeads(), nn.Tanh()).double()


def use_heads() -> dict[str, Tensor]:
    module = two_heads()
    model, _ = wrap(module, num_stages=2, num_microbatches=2)
    # Only replica 1 uses the second layer, so replica 0 has no gradient to offer.
    module[1].both = replica_rank() == 1
    inputs, targets = share_of(replica_rank())
    F.cross_entropy(model(inputs), targets).backward()
    return gradients(module)


def test_layers_that_some_or_all_replicas_leave_unused() -> None:
    plain = two_heads()
    inputs, targets = whole()
    losses = []
    for rank in (0, 1):
        plain[1].both = rank == 1
        part = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
        losses.append(F.cross_entropy(plain(inputs[part]), targets[part]))
    (sum(losses) / 2).backward()
    for ours in run_replicas(use_heads, 2):
        assert_close(ours, gradients(plain), 1e-12)
        assert "1.never.weight" not in ours


def freeze() -> dict[str, Tensor]:
    module = make_model("mlp")
    model, _ = wrap(module, num_stages=3, num_microbatches=2)
    for parameter in module[2].parameters():
        parameter.requires_grad_(False)
    inputs, targets = share_of(replica_rank())
    F.cross_entropy(model(inputs), targets).backward()
    return gradients(module)


def test_frozen_layers() -> None:
    plain = make_model("mlp")
    for parameter in plain[2].parameters():
        parameter.requires_grad_(False)
    inputs, targets = whole()
    F.cross_entropy(plain(inputs), targets).backward()
    for ours in run_replicas(freeze, 2):
        assert_close(ours, gradients(plain), 1e-12)


def accumulate_by_hand() -> dict[str, Tensor]:
    module = make_model("mlp")
    model, optimizer = wrap(module, num_stages=2, num_microbatches=2)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = share_of(replica_rank(), step)
        if step < 2:
            with model.no_sync():
                (F.cross_entropy(model(inputs), targets) / 3).backward()
        else:
            (F.cross_entropy(model(inputs), targets) / 3).backward()
        optimizer.step()
    return gradients(module)


def test_no_sync_adds_up_as_in_data_parallel_torch() -> None:
    plain = make_model("mlp")
    for step in range(3):
        inputs, targets = whole(step)
        (F.cross_entropy(plain(inputs), targets) / 3).backward()
    for ours in run_replicas(accumulate_by_hand, 2):
        assert_close(ours, gradients(plain), 1e-12)


class SparseProduct(nn.Module):
    """A lookup whose gradient is sparse though no layer says so."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.table, sparse=True)


def sparse(checkpoint: str) -> str:
    module = nn.Sequential(SparseProduct(), nn.Flatten(), nn.Linear(24, 3))
    model, _ = wrap(module, activation_checkpoint=checkpoint)
    try:
        model(torch.zeros(4, 6, dtype=torch.long)).sum().backward()
    except SynchronizationError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_sparse_gradients_are_refused_by_name(num_replicas: int) -> None:
    for message in run_replicas(sparse, num_replicas, "never"):
        assert "'0.table'" in message
        assert "sparse=False" in message


def sparse_layer() -> None:
    module = nn.Sequential(nn.Embedding(16, 4, sparse=True), nn.Flatten(), nn.Linear(24, 3))
    with pytest.raises(ConfigurationError, match=r"'0\.weight'.*sparse=False"):
        wrap(module)
    module[0].weight.requires_grad_(False)
    wrap(module)


def test_sparse_embeddings_are_refused_before_the_first_step() -> None:
    run_replicas(sparse_layer, 1)


def diverging_start() -> dict[str, Tensor]:
    init_process_group("gloo")
    torch.manual_seed(replica_rank())
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    wrap(module, num_stages=2)
    return dict(module.state_dict())


def test_replicas_begin_with_the_parameters_of_rank_0() -> None:
    first, second = run_replicas(diverging_start, 2)
    assert_close(second, first, 0.0)


def lose_a_peer() -> str:
    model, _ = wrap(make_model("mlp"), num_stages=2)
    if replica_rank() == 1:
        return "left"
    inputs, targets = share_of(0)
    try:
        F.cross_entropy(model(inputs), targets).backward()
    except SynchronizationError as error:
        return str(error)
    return "nothing was said"


def test_a_lost_peer_is_named() -> None:
    message, _ = run_replicas(lose_a_peer, 2)
    assert "replica 0 of 2 lost its peers while averaging gradients" in message
