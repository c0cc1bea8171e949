"""Mixed precision on a GPU, in two stages, beside torch's own on the plain model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import AdaptiveDataLoader, GradScaler, HybridParallel, init_process_group
from tests.hybrid.models import gradients, make_data
from tests.hybrid.replicas import run_replicas

pytestmark = pytest.mark.gpu
BATCH, STEPS = 16, 12

Trained = tuple[list[float], dict[str, Tensor]]
"""Loss scales after each step, and the parameters in the end."""


def make_layers() -> nn.Sequential:
    torch.manual_seed(3)
    widths = [(6, 64), (64, 64), (64, 64), (64, 3)]
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in widths))


def in_stages(scale: float, mode: str) -> Trained:
    init_process_group("gloo")
    module = make_layers()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    loader = AdaptiveDataLoader(make_data("mlp", BATCH * STEPS, torch.float32), batch_size=BATCH)
    model = HybridParallel(
        module,
        optimizer,
        balance=[2, 2],
        devices=["cuda:0", "cuda:0"],
        num_microbatches=1,
        activation_checkpoint=mode,
    )
    scaler, scales = GradScaler("cuda", init_scale=scale), []
    for inputs, targets in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(inputs), targets.cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, {name: p.detach().cpu() for name, p in module.named_parameters()}


def plain(scale: float) -> Trained:
    module = make_layers().cuda()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scaler, scales = torch.amp.GradScaler("cuda", init_scale=scale), []
    data = make_data("mlp", BATCH * STEPS, torch.float32)
    for start in range(0, BATCH * STEPS, BATCH):
        inputs, targets = (x.cuda() for x in data[start : start + BATCH])
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(module(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, {name: p.detach().cpu() for name, p in module.named_parameters()}


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("scale", [2.0**10, 2.0**24])
def test_float16_with_loss_scaling(scale: float, mode: str) -> None:
    """The greater scale overflows at first: those steps are left out, in both."""
    scales, parameters = run_replicas(in_stages, 1, scale, mode)[0]
    expected_scales, expected = plain(scale)
    assert scales == expected_scales
    assert (scales[0] < scale) == (scale == 2.0**24)
    for name, tensor in expected.items():
        torch.testing.assert_close(parameters[name], tensor, rtol=2e-2, atol=2e-3, msg=name)


def bfloat16_gradients(mode: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    init_process_group("gloo")
    module = make_layers()
    alone = copy.deepcopy(module).cuda()
    model = HybridParallel(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        balance=[2, 2],
        devices=["cuda:0", "cuda:0"],
        num_microbatches=1,
        activation_checkpoint=mode,
    )
    inputs, targets = (x.cuda() for x in make_data("mlp", BATCH, torch.float32)[:])
    for each in (model, alone):
        with torch.autocast("cuda", torch.bfloat16):
            output = each(inputs)
            assert output.dtype is torch.bfloat16 or each is alone
        F.cross_entropy(output.float(), targets).backward()
    return gradients(module), gradients(alone)


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_autocast_reaches_stages_and_their_recomputation(mode: str) -> None:
    ours, theirs = run_replicas(bfloat16_gradients, 1, mode)[0]
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-3 * gradient.norm(), name
