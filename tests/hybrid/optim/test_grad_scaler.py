"""Loss scaling for float16: with accumulation, replicas, overflows, clipping and the noise."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import (
    AdaptiveDataLoader,
    ConfigurationError,
    GradScaler,
    HybridParallel,
    init_process_group,
)
from pipollux_hybrid.job.context import context, reset
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.hybrid.models import assert_close, make_data
from tests.hybrid.replicas import run_replicas


class Half(nn.Module):
    """A linear layer in float16."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width_in, width_out)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            result: Tensor = self.linear(x)
        return result


def make_half() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Half(6, 16), nn.Tanh(), Half(16, 16), nn.Tanh(), Half(16, 3))


class Run:
    """Three iterations of 12 samples each, with at most ``local`` samples at a time."""

    def __init__(self, local: int, **options: Any) -> None:
        init_process_group("gloo")
        self.module = make_half()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.5, momentum=0.9)
        self.loader = AdaptiveDataLoader(make_data("mlp", 36, torch.float32), batch_size=12)
        self.loader.autoscale_batch_size(12, (1, local), gradient_accumulation=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 100)
        self.model = HybridParallel(
            self.module,
            self.optimizer,
            num_stages=2,
            num_microbatches=2,
            activation_checkpoint="always",
            lr_scheduler=self.scheduler,
        )
        self.scaler = GradScaler("cpu", **options)
        self.scales: list[float] = []
        self.norms: list[float] = []

    def body(self, inputs: Tensor, targets: Tensor, max_norm: float | None) -> None:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(inputs).float(), targets)
        self.scaler.scale(loss).backward()
        if max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            if self.model._complete:
                norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
                self.norms.append(float(norm))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()  # warnings are errors, also after a step that was left out
        self.scales.append(self.scaler.get_scale())

    def go(self, max_norm: float | None = None) -> Run:
        for inputs, targets in self.loader:
            self.body(inputs, targets, max_norm)
        return self

    def found(self) -> dict[str, Any]:
        metrics = context().component(Metrics)
        assert metrics.noise is not None
        return {
            "state": copy.deepcopy(self.module.state_dict()),
            "scales": self.scales,
            "norms": self.norms,
            "noise": (metrics.noise._sqr.value, metrics.noise._var.value),
            "steps": metrics.step,
            "samples": metrics.samples,
            "progress": metrics.progress,
        }


def train(local: int, max_norm: float | None, options: dict[str, Any]) -> dict[str, Any]:
    return Run(local, **options).go(max_norm).found()


@pytest.mark.parametrize(
    ("replicas", "local", "max_norm"),
    [
        pytest.param(1, 12, None, marks=pytest.mark.exhaustive),
        (1, 6, 0.1),
        (2, 3, None),
        pytest.param(2, 6, 0.1, marks=pytest.mark.exhaustive),
    ],
)
def test_scaled_training_is_the_unscaled_one(
    replicas: int, local: int, max_norm: float | None
) -> None:
    """To float16's rounding (2^-11): parameters, clipping and the noise of the gradient."""
    (plain, *_) = run_replicas(train, replicas, local, max_norm, {"enabled": False})
    for scaled in run_replicas(train, replicas, local, max_norm, {"init_scale": 2.0**10}):
        assert_close(scaled["state"], plain["state"], 2e-3)
        assert scaled["noise"] == pytest.approx(plain["noise"], rel=0.02)
        assert scaled["norms"] == pytest.approx(plain["norms"], rel=0.01)
        assert scaled["steps"] == 3
        assert set(scaled["scales"]) == {2.0**10}


def test_the_scale_grows_once_an_iteration() -> None:
    # 3 iterations of 4 loop bodies each; the scale grows after every second iteration.
    options = {"init_scale": 8.0, "growth_interval": 2}
    scales = run_replicas(train, 1, 3, None, options)[0]["scales"]
    assert scales == [8.0] * 7 + [16.0] * 5


def overflow(local: int) -> tuple[dict[str, Any], dict[str, Any], list[bool]]:
    """The first iteration overflows on rank 0 alone; the others are as usual."""
    run = Run(local, init_scale=2.0**10)
    before, cleared = copy.deepcopy(run.module.state_dict()), []
    for inputs, targets in run.loader:
        if context().component(Metrics).step == 0 and not run.scales and context().env.rank == 0:
            inputs = inputs * 1e30
        run.body(inputs, targets, None)
        if run.model._complete and run.scales[-1] == 2.0**9 and not cleared:
            assert context().component(Metrics).step == 0
            assert context().component(Metrics).samples == 0
            assert_close(dict(run.module.state_dict()), dict(before), 0)
            run.optimizer.zero_grad()
            cleared.append(all(p.grad is None for p in run.module.parameters()))
    return run.found(), before, cleared


@pytest.mark.parametrize(
    ("replicas", "local"), [pytest.param(1, 12, marks=pytest.mark.exhaustive), (1, 6), (2, 3)]
)
def test_an_iteration_that_overflows_is_left_out(replicas: int, local: int) -> None:
    for found, before, cleared in run_replicas(overflow, replicas, local):
        assert cleared == [True]
        assert found["steps"] == 2
        assert found["samples"] == 24
        assert found["progress"] == pytest.approx(2.0)
        assert found["scales"][-1] == 2.0**9
        assert all(torch.isfinite(x).all() for x in found["state"].values())
        assert any(not torch.equal(x, before[n]) for n, x in found["state"].items())
        assert all(map(torch.isfinite, map(torch.tensor, found["noise"])))


def foreign(fused: bool) -> str:
    init_process_group("gloo")
    module = make_half()
    optimizer = torch.optim.Adam(module.parameters(), fused=fused)
    model = HybridParallel(module, optimizer, num_stages=2)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(4, 6)).float().sum()).backward()
    with pytest.raises(ConfigurationError) as refusal:
        scaler.step(optimizer)
    return str(refusal.value)


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_scaler_is_refused(fused: bool) -> None:
    assert "pipollux.GradScaler" in run_replicas(foreign, 1, fused)[0]


def fused() -> list[Tensor]:
    init_process_group("gloo")
    results = []
    for options in ({"enabled": False}, {"init_scale": 2.0**10}):
        reset()
        module = make_half()
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01, fused=True)
        model = HybridParallel(module, optimizer, num_stages=2)
        scaler = GradScaler("cpu", **options)
        inputs, targets = make_data("mlp", 12, torch.float32).tensors
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(inputs).float(), targets)).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(nn.utils.parameters_to_vector(module.parameters()).detach())
    return results


def test_fused_optimizers_step_on_unscaled_gradients() -> None:
    plain, scaled = run_replicas(fused, 1)[0]
    torch.testing.assert_close(scaled, plain, rtol=1e-2, atol=1e-3)


def test_its_state_is_torchs() -> None:
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=7)
    scaler.scale(torch.ones(()))
    other = GradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()


def test_without_a_pipeline_it_is_torchs() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(parameter.sum()).backward()
    assert parameter.grad is not None
    assert parameter.grad.item() == 4.0
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 0.5
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_autocast_around_the_loop_body(checkpoint: str) -> None:
    """As scripts have it: the forward under autocast, the scaled backward outside of it."""
    reset()
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    module.append(nn.Linear(16, 3))
    plain = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    model = HybridParallel(
        module, optimizer, num_stages=2, num_microbatches=3, activation_checkpoint=checkpoint
    )
    scaler = GradScaler("cpu")
    seen: list[torch.dtype] = []
    module[2].register_forward_hook(lambda _layer, _inputs, output: seen.append(output.dtype))
    inputs, targets = make_data("mlp", 12, torch.float32)[list(range(12))]
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(inputs).float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        plain_optimizer.zero_grad()
        F.cross_entropy(plain(inputs), targets).backward()
        plain_optimizer.step()
    assert set(seen) == {torch.float16}
    # Ten bits of mantissa, four steps.
    assert_close(dict(module.state_dict()), dict(plain.state_dict()), 5e-3)
    reset()
