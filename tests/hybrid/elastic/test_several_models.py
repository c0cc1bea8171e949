"""Several models in one process, one after the other, as in a cross validation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipollux_hybrid import (
    AdaptiveDataLoader,
    ConfigurationError,
    HybridParallel,
    destroy_process_group,
    init_process_group,
    remaining_epochs_until,
    save_all_states,
)
from pipollux_hybrid.job import context as contexts
from tests.hybrid.models import assert_close
from tests.hybrid.replicas import run_replicas

FOLDS = 3


def train(fold: int, *, stops: bool = False) -> dict[str, Tensor]:
    init_process_group("gloo")
    torch.manual_seed(fold)
    x = torch.randn(16, 3, dtype=torch.float64)
    module = nn.Sequential(nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = AdaptiveDataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    model = HybridParallel(module, optimizer)
    for epoch in remaining_epochs_until(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            model.train_step(inputs, targets, nn.functional.mse_loss)
            optimizer.step()
        if stops and epoch == 0:
            break
    return dict(module.state_dict())


def train_all() -> list[dict[str, Tensor]]:
    found = []
    for fold in range(FOLDS):
        found.append({name: x.clone() for name, x in train(fold).items()})
        destroy_process_group()
    return found


def train_again() -> str:
    train(0)
    destroy_process_group()
    try:
        train(1)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


def test_two_replicas_under_torchrun() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    agent["TORCHELASTIC_RESTART_COUNT"] = "0"
    expected = train_all()
    for replica in run_replicas(train_all, 2, environment=agent):
        for found, fold in zip(replica, expected, strict=True):
            assert_close(found, fold, 1e-12)


def test_without_torchrun_they_cannot_meet_again() -> None:
    for message in run_replicas(train_again, 2):
        assert "was called again, after destroy_process_group(), in a job of several" in message


@pytest.mark.parametrize("stops", [False, True])
def test_another_model_does_not_continue_from_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    alone = {name: x.clone() for name, x in train(1).items()}
    destroy_process_group()
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_DIR", str(tmp_path / "first"))
    train(0, stops=stops)
    save_all_states()
    destroy_process_group()
    with pytest.raises(ConfigurationError, match="has the checkpoints of a training that this"):
        train(1)
    contexts.reset()
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_DIR", str(tmp_path / "second"))
    assert_close(train(1), alone, 0.0)
