"""The learner of a job, as the rest of the job finds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from pipollux_hybrid.errors import ConfigurationError

from .learner import Learner
from .options import PushPull

if TYPE_CHECKING:
    from pipollux_hybrid.job.context import JobContext


class Learning:
    """The learner of a job; it has none if gradients are averaged in every step."""

    def __init__(self, ctx: JobContext) -> None:  # noqa: ARG002  # a component of the job's
        self.learner: Learner | None = None


def learner_of(ctx: JobContext) -> Learner | None:
    """Return the learner of a job, once it has joined."""
    return ctx.component(Learning).learner


def make_learner(
    ctx: JobContext,
    options: PushPull | None,
    module: nn.Sequential,
    optimizer: torch.optim.Optimizer,
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None,
) -> Learner | None:
    """Return the learner of a replica that pushes and pulls; None: it averages gradients.

    Raises:
        ConfigurationError: The options are none, or servers are given without them.
    """
    if options is None and ctx.env.servers is not None:
        raise ConfigurationError(
            "PIPOLLUX_SERVERS is set, and HybridParallel averages gradients in every step: give it "
            "synchronization=pipollux.PushPull(…), or remove the variable, or servers from the job "
            "file"
        )
    if options is not None and not isinstance(options, PushPull):
        raise ConfigurationError(
            f"synchronization={options!r}: pipollux.PushPull(…) is needed, or None for an "
            "all-reduce in every step"
        )
    if options is None:
        return None
    return Learner(ctx, options, module, optimizer, lr_scheduler)


def check_supported(*, shards: bool, compares: int, ties: bool) -> None:
    """Refuse options of HybridParallel that need all replicas at the same step.

    Raises:
        ConfigurationError: Names the option.
    """
    refused = None
    if shards:
        refused = "shard_optimizer=True divides the optimizer's state among replicas"
    elif compares:
        refused = "check_replicas compares replicas after steps"
    elif ties:
        refused = "layers of several stages share parameters, whose gradients are summed over them"
    if refused is not None:
        raise ConfigurationError(
            f"{refused}, but with synchronization=PushPull(…) replicas train on their own between "
            "pushes: leave one of the two out"
        )
