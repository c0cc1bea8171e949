"""A script of a user's, for either engine: everything that goes over the stages is in it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pipollux_hybrid import (
    Accumulator,
    AdaptiveDataLoader,
    HybridParallel,
    init_process_group,
    register_for_checkpointing,
    remaining_epochs_until,
)
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.hybrid.models import make_data, make_model

BATCH_SIZE = 16
SIZE = 3 * BATCH_SIZE + 5


class Outcome(NamedTuple):
    """What a process of a job has in the end."""

    losses: list[float]
    norms: list[float]
    noise: float | None
    summed: dict[str, float]
    outputs: Tensor
    state: dict[str, Tensor]
    optimizer_state: int
    """Bytes."""
    samples: list[int]
    """Samples of each epoch, over all replicas."""


def whole_job(
    num_stages: int, num_epochs: int, schedule: str | None, accum_steps: int = 0
) -> Outcome:
    """Train, or go on training where a checkpoint is."""
    init_process_group("gloo")
    module = make_model("mlp")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    data = make_data("mlp", SIZE)
    loader = AdaptiveDataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    parts = context().env.num_replicas * (accum_steps + 1)
    loader.autoscale_batch_size(
        BATCH_SIZE, (1, -(-BATCH_SIZE // parts)), gradient_accumulation=True
    )
    model = HybridParallel(
        module,
        optimizer,
        num_stages=num_stages,
        num_microbatches=4,
        schedule=schedule,
        lr_scheduler=(scheduler := StepLR(optimizer, 4, 0.5)),
        check_replicas=True,
    )
    average = register_for_checkpointing(
        "average", AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    )
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(module))
    sums = Accumulator()
    losses, norms, samples = [], [], []
    for _ in remaining_epochs_until(num_epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = model.train_step(inputs, targets, F.cross_entropy)
            norm = float(model.clip_grad_norm_(0.5))  # NaN before the first step
            norms.append(norm if math.isfinite(norm) else 0.0)
            optimizer.step()
            scheduler.step()
            losses.append(float(loss))
            sums["samples"] += len(targets)
            sums["loss"] += loss * len(targets)
        with sums.synchronized():
            summed = {name: float(total) for name, total in sums.items()}
            samples.append(int(sums.pop("samples")))
    model.eval()
    with torch.no_grad():
        outputs = model(data.tensors[0])
    held = [x for state in optimizer.state.values() for x in state.values()]
    size = sum(x.numel() * x.element_size() for x in held if isinstance(x, Tensor) and x.dim())
    averaged = {f"average.{name}": x for name, x in average.module.state_dict().items()}
    state = {**module.state_dict(), **averaged}
    noise = context().component(Metrics).noise_scale()
    return Outcome(losses, norms, noise, summed, outputs, state, size, samples)
