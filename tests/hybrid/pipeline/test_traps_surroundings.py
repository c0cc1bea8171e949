"""Traps around the forward: autocast, hooks, devices and modes of the caller's thread.

Each was measured on torchgpipe 0.0.7 itself; the first lines of a test say what happened there.
"""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from tests.hybrid.models import assert_close, gradients
from tests.hybrid.pipeline.trap_cases import (
    MODES,
    engine,
    forward,
    fresh_context,  # noqa: F401  # a fixture, which pytest finds by its name
)

pytestmark = pytest.mark.usefixtures("threads")


class NotesDtype(nn.Module):
    """Linear; notes the dtype it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []
        self.cached = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.seen.append(y.dtype)
        self.cached |= torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
        return y


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("backward_inside", [True, False])
def test_outer_autocast_reaches_stages_and_their_recomputation(
    checkpoint: str, backward_inside: bool
) -> None:
    # Forward in float32 as autocast did not reach the workers, recomputation in bfloat16.
    module = nn.Sequential(NotesDtype(), NotesDtype())
    plain = copy.deepcopy(module)
    inputs = torch.randn(6, 4)
    with torch.autocast("cpu", torch.bfloat16):
        plain(inputs).float().square().mean().backward()
        loss = forward(engine(module, [1, 1], checkpoint), inputs, 6, 3).float().square().mean()
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    recomputed = {"always": 3, "except_last": 2, "never": 0}[checkpoint]
    for layer in module:
        assert isinstance(layer, NotesDtype)
        assert layer.seen == [torch.bfloat16] * (3 + recomputed)
        # A cast without a graph must not be used by the recomputation.
        assert not layer.cached
    # Rounding to bfloat16 differs with the size of a batch; 8 bits of mantissa are left.
    assert_close(gradients(module), gradients(plain), 2e-2)


def test_backward_under_an_autocast_that_the_forward_was_not_under() -> None:
    module = nn.Sequential(NotesDtype(), NotesDtype())
    loss = forward(engine(module, [1, 1], "always"), torch.randn(4, 4), 4, 2).sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    for layer in module:
        assert isinstance(layer, NotesDtype)
        assert layer.seen == [torch.float32] * 4


@pytest.mark.parametrize("checkpoint", MODES)
def test_outer_saved_tensor_hooks_reach_the_stages(checkpoint: str) -> None:
    # They are per thread, so what layers saved in worker threads was not packed.
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    packed: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward(engine(module, [2, 1], checkpoint), torch.randn(6, 4), 6, 3)
        output.sum().backward()
    # Tanh saves its output: each micro-batch's was packed, recomputed or not.
    assert packed.count((2, 4)) >= 3


class MakesTensor(nn.Module):
    """Notes where a factory function makes tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(torch.empty(1).device.type)
        y: Tensor = self.linear(x)
        return y


def test_outer_default_device_reaches_the_stages() -> None:
    module = nn.Sequential(MakesTensor(), MakesTensor())
    with torch.device("meta"):
        output = forward(engine(module, [1, 1], "always"), torch.randn(2, 4, device="cpu"), 2, 2)
    output.sum().backward()
    for layer in module:
        assert isinstance(layer, MakesTensor)
        assert layer.seen == ["meta"] * 4


def test_inference_mode_reaches_the_stages_and_leaves_nothing_behind() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipeline = engine(module, [1, 1], "always")
    with torch.inference_mode():
        assert forward(pipeline, torch.randn(4, 4), 4, 2).is_inference()
    forward(pipeline, torch.randn(4, 4), 4, 2).sum().backward()
    assert module[0].weight.grad is not None


@pytest.mark.exhaustive
def test_typed_storage_warning_is_not_the_scripts() -> None:
    # tensor.storage() in a copy gives a UserWarning, which fails scripts that treat it as an error.
    script = (
        "import torch, warnings\n"
        "from pipollux_hybrid.pipeline.engine import PipelineEngine\n"
        "warnings.simplefilter('error')\n"
        "module = torch.nn.Sequential(torch.nn.Linear(2, 2))\n"
        "PipelineEngine(module, [1], [torch.device('cpu')], 'never')\n"
        "torch.empty(0).storage()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)
