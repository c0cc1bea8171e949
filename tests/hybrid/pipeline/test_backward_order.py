"""A stage is done with a micro-batch before it recomputes another: memory holds one of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchgpipe.checkpoint import is_recomputing

from pipollux_hybrid import AdaptiveDataLoader, HybridParallel, init_process_group
from tests.hybrid.models import make_data
from tests.hybrid.replicas import run_replicas

LAYERS, MICROBATCHES = 3, 4
events: list[str] = []


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if is_recomputing():
            events.append("recompute")
        output: Tensor = self.linear(x)
        if output.requires_grad:
            output.register_hook(lambda _: events.append("backward"))
        return output


def train(mode: str) -> list[list[str]]:
    """What happens in the backward of each step."""
    init_process_group("gloo")
    module = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = HybridParallel(
        module, optimizer, num_microbatches=MICROBATCHES, activation_checkpoint=mode
    )
    steps = []
    data = make_data("mlp", 30 * 8, torch.float32)
    for inputs, targets in AdaptiveDataLoader(data, batch_size=8):  # the last measure no noise
        events.clear()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        steps.append(list(events))
    return steps


@pytest.mark.parametrize(("mode", "kept"), [("except_last", 1), ("always", 0)])
def test_the_last_micro_batch_goes_back_before_others_are_recomputed(mode: str, kept: int) -> None:
    first = ["backward"] * LAYERS * kept
    others = ["recompute"] * LAYERS + ["backward"] * LAYERS
    (steps,) = run_replicas(train, 1, mode)
    assert steps == [first + others * (MICROBATCHES - kept)] * 30
