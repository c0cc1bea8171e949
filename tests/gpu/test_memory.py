"""Memory of a stage on a GPU against what the layers' profile says of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from pipollux_hybrid import AdaptiveDataLoader, HybridParallel, init_process_group
from pipollux_perfmodel import stage_memory
from tests.hybrid.replicas import run_replicas

pytestmark = pytest.mark.gpu
WIDTH, BATCH, MICROBATCHES = 1024, 4096, 4


class Block(nn.Module):
    """A feed-forward layer, [batch, width] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return output


def peaks(mode: str) -> tuple[float, float]:
    """Bytes that one stage needs at most: as predicted, and as the allocator says."""
    init_process_group("gloo")
    torch.manual_seed(0)
    module = nn.Sequential(*(Block() for _ in range(6)), nn.Linear(WIDTH, 10))
    optimizer = torch.optim.AdamW(module.parameters())
    inputs, targets = torch.randn(BATCH, WIDTH), torch.zeros(BATCH, dtype=torch.long)
    model = HybridParallel(
        module,
        optimizer,
        num_stages=1,
        devices=["cuda:0"],
        num_microbatches=MICROBATCHES,
        activation_checkpoint=mode,
        example_inputs=inputs,
    )
    assert model.layer_profile is not None
    predicted = stage_memory(
        model.layer_profile, [7], BATCH / MICROBATCHES, MICROBATCHES, checkpoint=mode
    )
    data = TensorDataset(inputs.repeat(4, 1), targets.repeat(4))
    for step, (batch, labels) in enumerate(AdaptiveDataLoader(data, batch_size=BATCH)):
        if step == 2:  # the optimizer's state is there
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        F.cross_entropy(model(batch), labels.cuda()).backward()
        optimizer.step()
    return float(predicted[0]), float(torch.cuda.max_memory_allocated())


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_a_stage_needs_what_was_predicted(mode: str) -> None:
    """By one replica, which sends nobody a copy of its gradients: that much less."""
    predicted, measured = run_replicas(peaks, 1, mode)[0]
    assert 0.75 * predicted < measured < 1.05 * predicted, measured / predicted
