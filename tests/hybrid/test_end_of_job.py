"""What a job leaves in a process that goes on, as a notebook's does."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipollux_hybrid import AdaptiveDataLoader, HybridParallel, init_process_group
from pipollux_hybrid.job import context as contexts
from tests.extent import first
from tests.hybrid.models import make_data
from tests.hybrid.replicas import run_replicas
from tests.hybrid.stage_processes.training import run_stages


def train() -> list[weakref.ref[object]]:
    """Train a little; what the model, its parameters and its optimizer are, weakly."""
    contexts.reset()
    widths = [(6, 8), (8, 8), (8, 8), (8, 3)]
    module = nn.Sequential(*(nn.Linear(a, b) for a, b in widths)).double()
    optimizer = torch.optim.AdamW(module.parameters())
    stages = contexts.context().env.processes_per_replica
    model = HybridParallel(
        module,
        optimizer,
        num_stages=max(stages, 2),
        num_microbatches=2,
        example_inputs=torch.zeros(8, 6, dtype=torch.float64),
    )
    for inputs, targets in AdaptiveDataLoader(make_data("mlp", 64), batch_size=8):
        optimizer.zero_grad()
        model.train_step(inputs, targets, F.cross_entropy)
        optimizer.step()
    return [weakref.ref(x) for x in (model, module, optimizer, *module.parameters())]


def train_and_end() -> list[bool]:
    init_process_group("gloo")
    left = train()
    contexts.reset()
    gc.collect()
    return [what() is not None for what in left]


@pytest.mark.parametrize("num_replicas", first(1, [1, 2]))
def test_a_model_goes_with_its_job(num_replicas: int) -> None:
    """Else a GPU would have no room for the next one."""
    for left in run_replicas(train_and_end, num_replicas):
        assert not any(left)


def test_so_does_a_stage_in_a_process_of_its_own() -> None:
    ((first, last),) = run_stages(train_and_end, 1, 2)
    assert not any(first + last)
