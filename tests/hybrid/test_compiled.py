"""Compiled layers train exactly like plain ones, with both kinds of pipelines."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import HybridParallel, init_process_group
from tests.hybrid.models import Residual, assert_close, make_data, state_of
from tests.hybrid.replicas import run_replicas
from tests.hybrid.stage_processes.training import run_stages, together

STEPS = 3


def make_layers() -> nn.Sequential:
    torch.manual_seed(4)
    blocks = [Residual(8), nn.Dropout(0.0), Residual(8)]
    return nn.Sequential(nn.Embedding(16, 8), *blocks, nn.Flatten(), nn.Linear(48, 3)).double()


def train(backend: str | None, stages: int, checkpoint: str) -> dict[str, Tensor]:
    """Train with several micro-batches, the last one shorter, and return the parameters."""
    # torch.compile reads the gradients of a layer's inputs, in the plain model as well.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    if backend == "inductor":  # its import uses deprecated functions of torch
        warnings.filterwarnings("ignore", category=DeprecationWarning)
    init_process_group("gloo")
    module = make_layers()
    for name, layer in list(module.named_children()):
        if backend is not None and isinstance(layer, Residual):
            setattr(module, name, torch.compile(layer, backend=backend))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    model = HybridParallel(
        module,
        optimizer,
        num_stages=stages,
        num_microbatches=2,
        activation_checkpoint=checkpoint,
    )
    inputs, targets = make_data("transformer", 7).tensors
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.train_step(inputs, targets, F.cross_entropy)
        optimizer.step()
    return {name.replace("._orig_mod", ""): x for name, x in state_of(module).items()}


def check(backend: str, processes: int, checkpoint: str) -> None:
    if processes == 1:
        (plain,), (compiled,) = (run_replicas(train, 1, x, 2, checkpoint) for x in (None, backend))
    else:
        ((plain,), (compiled,)) = (
            [together(replica) for replica in run_stages(train, 1, 2, x, 2, checkpoint)]
            for x in (None, backend)
        )
    # inductor fuses operations, which rounds otherwise in the last digits.
    assert_close(compiled, plain, 0 if backend == "eager" else 1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("checkpoint", ["except_last", "never"])
def test_compiled_layers_train_like_plain_ones(processes: int, checkpoint: str) -> None:
    check("eager", processes, checkpoint)


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("processes", [1, 2])
def test_layers_that_inductor_compiles_train_like_plain_ones(processes: int) -> None:
    check("inductor", processes, "except_last")
