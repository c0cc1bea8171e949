"""Traps of micro-batches: their number changes, or a batch is shorter than it.

Each was measured on torchgpipe 0.0.7 itself; the first lines of a test say what happened there.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import init_process_group
from pipollux_hybrid.job import context as contexts
from tests.hybrid.models import assert_close, gradients, make_data, make_model
from tests.hybrid.pipeline.trap_cases import (
    MODES,
    CountsForwards,
    engine,
    forward,
    fresh_context,  # noqa: F401  # a fixture, which pytest finds by its name
    wrap,
)
from tests.hybrid.replicas import run_replicas


@pytest.mark.parametrize("checkpoint", MODES)
def test_chunks_raised_after_the_first_forward(checkpoint: str) -> None:
    # IndexError: copy streams are cached at the first forward, as many as there were chunks.
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    pipeline = engine(module, [1, 1], checkpoint)
    inputs = torch.randn(8, 3)
    for num_microbatches in (1, 2, 8, 4):
        output = forward(pipeline, inputs, 8, num_microbatches)
        torch.testing.assert_close(output, module(inputs))


def test_except_last_on_a_batch_shorter_than_the_micro_batches() -> None:
    # The last micro-batch was taken to be number `chunks`, so a short batch was recomputed whole.
    layer = CountsForwards()
    forward(engine(nn.Sequential(layer), [1], "except_last"), torch.randn(3, 3), 3, 4).sum()
    assert (layer.all, layer.with_gradients) == (3, 1)


def micro_batches_from_4_to_2(checkpoint: str) -> dict[str, Tensor]:
    init_process_group("gloo")
    module = make_model("mlp")
    model = wrap(module, num_stages=2, activation_checkpoint=checkpoint)
    rank = contexts.context().env.rank
    inputs, targets = make_data("mlp", 8)[list(range(rank * 4, rank * 4 + 4))]
    for num_microbatches in (4, 2):
        model.num_microbatches = num_microbatches
        module.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
    return gradients(module)


@pytest.mark.parametrize("checkpoint", MODES)
def test_data_parallel_gradients_when_micro_batches_fall_from_4_to_2(checkpoint: str) -> None:
    # DistributedDataParallel with static_graph=True over GPipe: silently wrong gradients.
    module = make_model("mlp")
    inputs, targets = make_data("mlp", 8)[list(range(8))]
    F.cross_entropy(module(inputs), targets).backward()
    for ours in run_replicas(micro_batches_from_4_to_2, 2, checkpoint):
        assert_close(ours, gradients(module), 1e-12)
