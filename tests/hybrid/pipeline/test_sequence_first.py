"""Layers that would be given parts of sequences, and weights that a forward changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import HybridParallel, init_process_group
from pipollux_hybrid.errors import ConfigurationError
from tests.hybrid.replicas import run_replicas
from tests.hybrid.stage_processes.training import run_stages

LENGTH, BATCH, WIDTH = 6, 4, 6
SOON = {"PIPOLLUX_TIMEOUT": "60"}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrence = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.recurrence(x)[0]
        return y


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.5)


LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "LSTM": (Recurrent, "'1.recurrence' (LSTM)"),
    "attention": (encoder, "'1.self_attn' (MultiheadAttention)"),
}


def train(name: str, schedule: str | None, num_microbatches: int) -> str:
    init_process_group("gloo")
    torch.manual_seed(0)
    layer = LAYERS[name][0]
    module = nn.Sequential(nn.Embedding(10, WIDTH), layer(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = HybridParallel(
        module, optimizer, balance=[2, 1], num_microbatches=num_microbatches, schedule=schedule
    )
    tokens = torch.randint(10, (LENGTH, BATCH))
    try:
        model.train_step(tokens, tokens % WIDTH, lambda x, y: F.cross_entropy(x.mT, y))
    except ConfigurationError as error:
        return str(error)
    except RuntimeError as error:  # of a stage whose peer was refused
        return f"lost: {error}"
    return "trained"


@pytest.mark.parametrize("name", list(LAYERS))
def test_parts_of_sequences_are_refused(name: str) -> None:
    (one,) = run_replicas(train, 1, name, None, 2)
    ((first, last),) = run_stages(train, 1, 2, name, "1f1b", 2, environment=SOON)
    for told in (one, first):
        assert "dimension 0 of inputs, of targets and between layers must be the batch" in told
        assert LAYERS[name][1] in told
    assert last.startswith("lost")


def test_whole_sequences_are_trained() -> None:
    assert run_replicas(train, 1, "LSTM", None, 1) == ["trained"]


def test_weights_that_a_forward_changes_are_refused() -> None:
    module = nn.Sequential(nn.Embedding(10, WIDTH, max_norm=1.0), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ConfigurationError, match=r"layer '0' is an Embedding with max_norm=1\.0"):
        HybridParallel(module, torch.optim.SGD(module.parameters(), lr=0.1))
