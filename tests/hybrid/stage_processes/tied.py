"""Models whose layers share parameters, and training them with a process per stage."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipollux_hybrid import (
    AdaptiveDataLoader,
    HybridParallel,
    init_process_group,
    remaining_epochs_until,
)
from pipollux_hybrid.job.context import context
from pipollux_hybrid.optim.gradient_noise_scale import MeasuredNoise
from tests.hybrid.models import Residual, make_data, state_of

BATCH_SIZE = 16
SIZE = 2 * BATCH_SIZE + 11
"""Two whole batches and one that neither replicas nor accumulation steps divide."""


class Mean(nn.Module):
    """Over a sequence, [batch, length, width] to [batch, width]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def language() -> nn.Sequential:
    """Embedding and head share their weight: integers [batch, 6] to outputs [batch, 16]."""
    embedding, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, Residual(8), Residual(8), Mean(), head)


def square() -> nn.Sequential:
    """Three layers share a weight, two of them a bias, too: [batch, 6] to [batch, 6]."""
    first, *others = (nn.Linear(6, 6) for _ in range(4))
    others[1].weight = others[2].weight = first.weight
    others[2].bias = others[1].bias
    return nn.Sequential(first, nn.Tanh(), others[0], others[1], nn.Tanh(), others[2])


def make(name: str, *, frozen: bool = False) -> nn.Sequential:
    """A model with the same parameters at every call."""
    torch.manual_seed(7)
    module = {"language": language, "square": square}[name]().double()
    shared: nn.Parameter = module[0].weight  # type: ignore[assignment]  # the shared one
    shared.requires_grad_(not frozen)
    return module


def data_of(name: str, size: int = SIZE) -> TensorDataset:
    return make_data("transformer" if name == "language" else "mlp", size)


def by_all_names(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all gradients on the CPU, those of a shared parameter under each of its names."""
    named = module.named_parameters(remove_duplicate=False)
    return {n: p.grad.to("cpu", copy=True) for n, p in named if p.grad is not None}


class Job(NamedTuple):
    """How a model is trained."""

    name: str
    balance: list[int] | None
    schedule: str | None = "1f1b"
    accum_steps: int = 0
    checkpoint: str = "except_last"
    sharded: bool = False
    adam: bool = True
    max_norm: float | None = 0.05
    frozen: bool = False
    epochs: int = 1
    backend: str = "gloo"


class Outcome(NamedTuple):
    """What a process has in the end."""

    losses: list[float]
    norms: list[float]
    noise: tuple[float, ...]
    """The gradient's: its squared norm, its variance, and in how many steps they were measured."""
    gain: float
    gradients: list[dict[str, Tensor]]
    state: dict[str, Tensor]
    whole: dict[str, Tensor]
    """What ``model.state_dict()`` gives."""


def make_optimizer(module: nn.Module, adam: bool) -> torch.optim.Optimizer:
    if adam:
        return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def train(job: Job) -> Outcome:
    """Train, or go on where a checkpoint is; with other micro-batches at every forward."""
    init_process_group(job.backend)
    env = context().env
    module = make(job.name, frozen=job.frozen)
    optimizer = make_optimizer(module, job.adam)
    loader = AdaptiveDataLoader(data_of(job.name), batch_size=BATCH_SIZE)
    parts = env.num_replicas * (job.accum_steps + 1)
    loader.autoscale_batch_size(
        BATCH_SIZE, (1, -(-BATCH_SIZE // parts)), gradient_accumulation=True
    )
    model = HybridParallel(
        module,
        optimizer,
        balance=job.balance,
        num_stages=None if job.balance else env.processes_per_replica,
        num_microbatches=4,
        activation_checkpoint=job.checkpoint,
        schedule=job.schedule,
        shard_optimizer=job.sharded,
        check_replicas=True,
    )
    losses, norms, history = [], [], []
    turns = itertools.cycle((4, 1, 3, 8, 2))
    for _ in remaining_epochs_until(job.epochs):
        for inputs, targets in loader:
            model.num_microbatches = next(turns)
            optimizer.zero_grad()
            losses.append(float(model.train_step(inputs, targets, F.cross_entropy)))
            micro_step = context().batch.micro_step
            assert micro_step is not None
            if micro_step.is_optimizer_step:
                history.append(by_all_names(module))
                if job.max_norm is not None:
                    norms.append(float(model.clip_grad_norm_(job.max_norm)))
            optimizer.step()
    scale = context().component(MeasuredNoise).scale
    assert scale is not None
    noise = scale._sqr.value, scale._var.value, float(scale.num_samples)
    state, whole = state_of(module), state_of(model)
    return Outcome(losses, norms, noise, model.gain, history, state, whole)
