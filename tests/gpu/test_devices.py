"""What waits for a GPU and what does not: timers, the profile of layers, copies for checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipollux_hybrid import profile_layers
from pipollux_hybrid.checkpoint.async_save import StagingBuffers
from pipollux_hybrid.pipeline.engine import PipelineEngine
from pipollux_hybrid.telemetry.stage_timer import StageTimer

pytestmark = pytest.mark.gpu


def test_layers_are_measured_on_the_gpu() -> None:
    module = nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 8))
    profile = profile_layers(module, torch.randn(512, 64), device="cuda:0")
    assert all(p.device.type == "cpu" for p in module.parameters())
    assert profile.layers[1].forward_beta > 0
    torch._C._cuda_clearCublasWorkspaces()  # which torch keeps for each thread
    assert torch.cuda.memory_allocated() == 0


def test_timers_do_not_make_a_gpu_wait() -> None:
    devices = [torch.device("cuda", 0)] * 2
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    engine = PipelineEngine(module, [1, 1], devices, "never")
    timer = StageTimer(engine.stages, devices)

    def step() -> None:
        output = engine.run(torch.ones(8, 64, device="cuda"), [4, 4], training=True)
        assert isinstance(output, Tensor)
        output.sum().backward()

    step()  # what a first one waits for: kernels are loaded, memory is found
    torch.cuda.synchronize()
    timer.start(0)
    torch.cuda._sleep(2_000_000_000)
    step()
    recording = timer.stop()
    assert recording is not None
    assert not recording.done(), "the device sleeps yet, and nobody waited for it"
    torch.cuda.synchronize()
    assert recording.done()
    assert all(event.end >= event.start >= 0.0 for event in recording.events())


def test_background_copies_from_cuda_before_the_next_step() -> None:
    source: Tensor = torch.zeros(1 << 24, device="cuda")
    copies = StagingBuffers()
    for value in range(4):
        source.fill_(value)
        copy = copies.take({"x": source})["x"]
        source.fill_(-1)  # queued behind the copy
        copies.wait()
        assert copy.is_pinned()
        assert bool((copy == value).all())
