"""Buffers meet, and replicas prove that they hold the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import (
    AdaptiveDataLoader,
    ConfigurationError,
    HybridParallel,
    SynchronizationError,
    all_reduce_sum,
    init_process_group,
    replica_rank,
)
from pipollux_hybrid.job.context import context
from pipollux_hybrid.job.env import JobEnvironment
from pipollux_hybrid.sync.replica_check import check_interval
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.hybrid.models import make_data, make_model
from tests.hybrid.replicas import run_replicas


class Counting(nn.Module):
    """Keeps sums over its inputs in buffers of several types."""

    def __init__(self, growing: bool = False) -> None:
        super().__init__()
        self.growing = growing
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("own", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))

    def combined_buffers(self) -> list[str]:
        return ["own"]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean += x.mean(0)
                self.rows += 1
                self.seen[replica_rank()] = True
                self.own += 1 + replica_rank()
                self.replaced = torch.full((2 + self.growing * replica_rank(),), x.sum().item())
        return x


def count(broadcast_buffers: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    init_process_group("gloo")
    module = nn.Sequential(nn.Linear(6, 6), Counting(), nn.Linear(6, 3)).double()
    module[1].own = module[1].own.float()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = HybridParallel(
        module,
        optimizer,
        num_stages=2,
        num_microbatches=2,
        activation_checkpoint="never",
        broadcast_buffers=broadcast_buffers,
    )
    inputs, targets = make_data("mlp", 8)[list(range(8))]
    half = slice(4 * replica_rank(), 4 * replica_rank() + 4)
    before = {}
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[half]), targets[half])
        before = {name: tensor.clone() for name, tensor in module.named_buffers()}
        loss.backward()
        optimizer.step()
    return before, dict(module.named_buffers())


def test_changed_buffers_become_those_of_rank_0() -> None:
    (before, first), (_, second) = run_replicas(count, 2, True)
    for name in ("1.mean", "1.rows", "1.seen", "1.replaced"):
        assert torch.equal(first[name], before[name])
        assert torch.equal(second[name], first[name])
        assert bool(first[name].any())
    assert first["1.own"].tolist() == [6.0, 6.0]
    assert second["1.own"].tolist() == [12.0, 12.0], "the layer combines it by itself"


def test_buffers_may_be_left_alone() -> None:
    (_, first), (_, second) = run_replicas(count, 2, False)
    assert not torch.equal(first["1.mean"], second["1.mean"])


def grow() -> str:
    init_process_group("gloo")
    module = nn.Sequential(nn.Linear(6, 6), Counting(growing=True), nn.Linear(6, 3)).double()
    model = HybridParallel(module, torch.optim.SGD(module.parameters(), lr=0.1))
    try:
        model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    except SynchronizationError as error:
        return str(error)
    return "nothing was said"


def test_buffers_of_other_sizes_are_refused_everywhere() -> None:
    for message in run_replicas(grow, 2):
        assert "different numbers of bytes" in message
        assert "broadcast_buffers=False" in message


def add_up() -> list[Tensor]:
    init_process_group("gloo")
    mine = replica_rank() + 1
    tensors = [
        torch.full((2, 2), float(mine)),
        torch.tensor(mine),
        torch.full((3,), mine / 3, dtype=torch.float64),
        torch.zeros(0),
    ]
    all_reduce_sum(tensors)
    return tensors


@pytest.mark.parametrize(("num_replicas", "total"), [(1, 1), (3, 6)])
def test_sums_over_replicas(num_replicas: int, total: int) -> None:
    for block, number, double, _ in run_replicas(add_up, num_replicas):
        assert block.tolist() == [[total, total]] * 2
        assert int(number) == total
        assert double.tolist() == pytest.approx([total / 3] * 3, rel=1e-15)


def perturb(kind: str) -> tuple[str, int]:
    init_process_group("gloo")
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    loader = AdaptiveDataLoader(make_data("mlp", 64), batch_size=8)
    # Later than the first optimizer steps, and compared at every second.
    model = HybridParallel(module, optimizer, num_stages=2, check_replicas=2)
    for number, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        if number == 5 and replica_rank() == 1:
            with torch.no_grad():
                if kind == "parameter":
                    module[2].bias[0] += 1e-12
                elif kind == "buffer":
                    module[1].running_var[0] *= 1 + 1e-12
                elif kind == "frozen":
                    module[2].bias.requires_grad_(False)
                else:
                    module.add_module("3", nn.Linear(3, 3))
        try:
            optimizer.step()
        except SynchronizationError as error:
            return str(error), context().component(Metrics).step
    return "nothing was said", 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("parameter", "parameter '2.bias' is the first that does"),
        pytest.param(
            "buffer", "buffer '1.running_var' is the first that does", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            "frozen", "parameter '2.bias' is the first that does", marks=pytest.mark.exhaustive
        ),
        ("layer", "9 on replica 0, 11 on replica 1, 9 on replica 2"),
    ],
)
def test_replicas_that_differ_are_named_on_every_replica(kind: str, expected: str) -> None:
    messages = run_replicas(perturb, 3, kind)
    assert len(set(messages)) == 1
    message, step = messages[0]
    assert step == 6, "changed in step 6, compared after every second"
    assert "replicas differ after optimizer step 6: " in message
    assert expected in message
    if kind != "layer":
        assert "on replicas 0, 2" in message
        assert "on replica 1)" in message


def compare_all_along(adam: bool) -> int:
    init_process_group("gloo")
    module = make_model("transformer", torch.float32)
    optimizer = (
        torch.optim.AdamW(module.parameters(), lr=0.01)
        if adam
        else torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    )
    loader = AdaptiveDataLoader(make_data("transformer", 90, torch.float32), batch_size=12)
    loader.autoscale_batch_size(12, (1, 3), gradient_accumulation=True)
    model = HybridParallel(module, optimizer, num_stages=3, bucket_bytes=600)
    for number, (inputs, targets) in enumerate(loader):
        model.num_microbatches = 1 + number % 3
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
    assert model._check._interval == 1
    return context().component(Metrics).step


@pytest.mark.exhaustive  # tests of whole jobs compare them after every step
@pytest.mark.parametrize(("num_replicas", "adam"), [(3, True), (2, False), (2, True), (3, False)])
def test_replicas_are_the_same_after_every_step(num_replicas: int, adam: bool) -> None:
    steps = run_replicas(
        compare_all_along, num_replicas, adam, environment={"PIPOLLUX_CHECK_REPLICAS": "1"}
    )
    assert steps == [8] * num_replicas


def test_how_often_replicas_are_compared() -> None:
    assert [check_interval(value, 0) for value in (False, True, 5)] == [0, 1, 5]
    assert check_interval(False, 3) == 3
    assert JobEnvironment.read({"PIPOLLUX_CHECK_REPLICAS": "7"}).check_replicas == 7
    for wrong in (-1, 0.5, "yes"):
        with pytest.raises(ConfigurationError, match="check_replicas="):
            check_interval(wrong, 0)
