"""Training where each stage has a process, and what the processes have together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipollux_hybrid import AdaptiveDataLoader, HybridParallel, init_process_group
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from tests.hybrid.models import freeze_statistics, gradients, make_data, make_model, state_of
from tests.hybrid.replicas import run_replicas

BATCH_SIZE = 24
SIZE = 2 * BATCH_SIZE + 17
"""Two whole batches and one that neither replicas nor accumulation steps divide."""


class Case(NamedTuple):
    """How a model is trained."""

    checkpoint: str | Sequence[str]
    accum_steps: int
    schedule: str
    sharded: bool = False


class Trained(NamedTuple):
    """What one process has: its stage's."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    state: dict[str, Tensor]


def run_stages(
    function: Callable[..., Any], num_replicas: int, num_stages: int, *args: Any, **options: Any
) -> list[list[Any]]:
    """Call a function in the processes of all stages; what they return, by replica and stage."""
    environment = {"PIPOLLUX_PROCESSES_PER_REPLICA": str(num_stages)}
    environment |= options.pop("environment", {})
    found = run_replicas(
        function, num_replicas * num_stages, *args, environment=environment, **options
    )
    return [found[first : first + num_stages] for first in range(0, len(found), num_stages)]


def optimizer_for(module: torch.nn.Module, adam: bool) -> torch.optim.Optimizer:
    if adam:
        return torch.optim.AdamW(module.parameters(), lr=1e-3)
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def train(name: str, case: Case, epochs: int, adam: bool) -> Trained:
    """Train with another number of micro-batches at every forward; float64."""
    contexts.reset()
    env = context().env
    module = make_model(name)
    freeze_statistics(module)
    optimizer = optimizer_for(module, adam)
    loader = AdaptiveDataLoader(make_data(name, SIZE), batch_size=BATCH_SIZE)
    parts = env.num_replicas * (case.accum_steps + 1)
    loader.autoscale_batch_size(
        BATCH_SIZE, (1, -(-BATCH_SIZE // parts)), gradient_accumulation=True
    )
    model = HybridParallel(
        module,
        optimizer,
        num_stages=env.processes_per_replica,
        num_microbatches=1,
        activation_checkpoint=case.checkpoint,
        schedule=case.schedule,
        shard_optimizer=case.sharded,
    )
    losses, history = [], []
    turns = itertools.cycle((8, 1, 3, 5, 2, 7, 4, 6))
    for _ in range(epochs):
        for inputs, targets in loader:
            model.num_microbatches = next(turns)
            optimizer.zero_grad()
            losses.append(float(model.train_step(inputs, targets, F.cross_entropy)))
            micro_step = context().batch.micro_step
            assert micro_step is not None
            if micro_step.is_optimizer_step:
                history.append(gradients(module))
            optimizer.step()
    return Trained(losses, history, state_of(module))


def train_all(
    name: str, cases: Sequence[Case], epochs: int, adam: bool, backend: str = "gloo"
) -> list[Trained]:
    init_process_group(backend)
    return [train(name, case, epochs, adam) for case in cases]


def together(stages: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return what the processes of a replica have together."""
    whole: dict[str, Tensor] = {}
    for stage in stages:
        assert not whole.keys() & stage.keys(), "two stages hold the same"
        whole |= stage
    return whole
