"""Gradients of two replicas that share a GPU with both of their stages, in small buckets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipollux_hybrid import HybridParallel, init_process_group, replica_rank
from tests.gpu.sharing import ON_THE_GPU
from tests.hybrid.models import assert_close, gradients, make_data, make_model, plain_training
from tests.hybrid.replicas import run_replicas

pytestmark = pytest.mark.gpu
ROWS = 12


def train(checkpoint: str, backend: str) -> list[dict[str, Tensor]]:
    init_process_group(backend)
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = HybridParallel(
        module,
        optimizer,
        balance=[5, 4],
        num_microbatches=2,
        activation_checkpoint=checkpoint,
        bucket_bytes=500,
        check_replicas=True,
    )
    history = []
    for step in range(3):
        start = step * ROWS + replica_rank() * ROWS // 2
        inputs, targets = make_data("mlp", 64)[list(range(start, start + ROWS // 2))]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets.to(model.output_device)).backward()
        history.append(gradients(module))
        optimizer.step()
    return history


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_gradients_are_the_plain_models(checkpoint: str, backend: str) -> None:
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    batches = [range(start, start + ROWS) for start in range(0, 3 * ROWS, ROWS)]
    expected = plain_training(module, optimizer, make_data("mlp", 64), batches)
    for history in run_replicas(train, 2, checkpoint, backend, environment=ON_THE_GPU):
        for ours, theirs in zip(history, expected, strict=True):
            assert_close(ours, theirs, 1e-12)
