"""An average of the parameters that the loop body updates follows optimizer steps only."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from pipollux_hybrid import AdaptiveDataLoader, HybridParallel, init_process_group
from pipollux_hybrid.job.context import context
from tests.extent import first
from tests.hybrid.replicas import run_replicas
from tests.hybrid.stage_processes.training import run_stages

BATCH, STEPS = 8, 4


def make() -> tuple[nn.Sequential, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    inputs = torch.randn(STEPS * BATCH, 3, dtype=torch.float64)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return module, torch.optim.SGD(module.parameters(), lr=0.1), data


def average_of(module: nn.Module) -> AveragedModel:
    return AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))


def parameters_of(average: AveragedModel) -> dict[str, Tensor]:
    return dict(average.module.named_parameters())


def plain() -> dict[str, Tensor]:
    module, optimizer, data = make()
    average = average_of(module)
    inputs, targets = data.tensors
    for x, y in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
        optimizer.zero_grad()
        F.mse_loss(module(x), y).backward()
        optimizer.step()
        average.update_parameters(module)
    return {name: x.detach() for name, x in parameters_of(average).items()}


def ours(schedule: str | None) -> tuple[int, dict[str, Tensor]]:
    """Return how often the body ran, and this process's averages."""
    init_process_group("gloo")
    module, optimizer, data = make()
    loader = AdaptiveDataLoader(data, batch_size=BATCH)
    share = BATCH // context().env.num_replicas
    loader.autoscale_batch_size(BATCH, (1, share // 2), gradient_accumulation=True)
    model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=2, schedule=schedule)
    average, bodies = average_of(module), 0
    for x, y in loader:
        optimizer.zero_grad()
        model.train_step(x, y, F.mse_loss)
        optimizer.step()
        average.update_parameters(module)
        bodies += 1
    return bodies, {name: x.detach() for name, x in parameters_of(average).items()}


def check(found: list[tuple[int, dict[str, Tensor]]]) -> None:
    expected = plain()
    for bodies, averages in found:
        assert bodies == 2 * STEPS
        for name, value in averages.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_replicas", first(1, [2, 1]))
def test_where_one_process_drives_all_stages(num_replicas: int) -> None:
    check(run_replicas(ours, num_replicas, None))


def test_where_each_stage_has_a_process() -> None:
    (replica,) = run_stages(ours, 1, 2, "1f1b")
    check(replica)
    assert set(replica[0][1]) | set(replica[1][1]) == set(plain())


def test_averages_follow_every_call_again_afterwards() -> None:
    update = AveragedModel.update_parameters
    (name,) = run_replicas(updates_afterwards, 1)
    assert name == update.__qualname__


def updates_afterwards() -> str:
    from pipollux_hybrid import destroy_process_group

    ours(None)
    destroy_process_group()
    return AveragedModel.update_parameters.__qualname__
