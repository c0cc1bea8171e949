"""The script of docs/howto/evaluate.md gives what plain PyTorch does, on any replicas."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pipollux_hybrid import ElasticSampler, init_process_group
from tests.extent import first
from tests.hybrid.stage_processes.training import run_stages

STOP_AT = 10
"""Step of the second of three epochs, between two evaluations."""


def blocks(repository: Path) -> list[str]:
    text = (repository / "docs" / "howto" / "evaluate.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run_page(code: list[str], folder: str, stages: int, stop_at: int | None) -> int:
    """Run the page from top to bottom; the optimizer steps that were done when it ended."""
    os.chdir(folder)
    torch.set_default_dtype(torch.float64)
    init_process_group("gloo")
    names: dict[str, Any] = {"__name__": "docs_evaluation", "STAGES": stages}

    def run(block: str) -> None:
        exec(compile(block, "docs/howto/evaluate.md", "exec"), names)  # noqa: S102  # our own page

    for block in code[:-1]:
        run(block)

    def stop(*_: object) -> None:
        if names["progress"].step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    names["optimizer"].register_step_post_hook(stop)
    try:
        run(code[-1])
    except SystemExit:
        assert stop_at is not None
    if names["writer"] is not None:
        names["writer"].close()
    return int(names["progress"].step)


def plain() -> tuple[dict[str, dict[int, float]], dict[str, Tensor]]:
    """The losses by name and step, and the best average, without Pipollux."""
    torch.manual_seed(0)
    inputs = torch.randn(96, 4)
    targets = inputs.sum(1, keepdim=True)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    losses: dict[str, dict[int, float]] = {"held-out/loss": {}, "held-out/averaged": {}}
    best: dict[str, Tensor] = {}
    sampler = ElasticSampler(64, shuffle=True, seed=0)
    step = 0
    for epoch in range(3):
        for chosen in sampler.order(epoch).split(8):
            optimizer.zero_grad()
            F.mse_loss(module(inputs[chosen]), targets[chosen]).backward()
            optimizer.step()
            average.update_parameters(module)
            step += 1
            if step % 3 == 0:
                with torch.no_grad():
                    for name, model in (("loss", module), ("averaged", average)):
                        loss = F.mse_loss(model(inputs[64:]), targets[64:])
                        losses[f"held-out/{name}"][step] = loss.item()
                found = losses["held-out/averaged"]
                if found[step] == min(found.values()):
                    best = {name: x.clone() for name, x in average.module.state_dict().items()}
    return losses, best


@pytest.mark.parametrize("replicas_and_stages", first(1, [(2, 1), (2, 2), (1, 1), (1, 2)]))
def test_the_page_runs_and_gives_what_plain_pytorch_gives(
    repository: Path, tmp_path: Path, replicas_and_stages: tuple[int, int]
) -> None:
    """Stopped in the second epoch, and started again with other replicas."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    replicas, stages = replicas_and_stages
    environment = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    code = blocks(repository)
    for count, stop_at in ((replicas, STOP_AT), (3 - replicas, None)):
        args = (code, str(tmp_path), stages, stop_at)
        ended = run_stages(run_page, count, stages, *args, environment=environment)
        assert {step for found in ended for step in found} <= {STOP_AT, STOP_AT + 1, 24}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        losses, best = plain()
    finally:
        torch.set_default_dtype(default)
    events = EventAccumulator(str(tmp_path / "runs" / "own"))
    events.Reload()
    for name, expected in losses.items():
        logged = {event.step: event.value for event in events.Scalars(name)}
        assert logged == pytest.approx(expected, rel=1e-6), "as float32"
    saved = torch.load(tmp_path / "best.pt", weights_only=True)
    torch.testing.assert_close(saved, best, rtol=1e-10, atol=1e-12)
