"""Rejects optimizer steps with gradients that the pipeline has not averaged.

Scripts may have more optimizers than the one of HybridParallel: for the parameters of a loss, for a
model that is not wrapped (a discriminator), or a new one over the same parameters. Nobody averages
the gradients of the former over replicas and accumulation steps. PyTorch calls hooks around the
steps of all optimizers, so such a step is seen.

The script may average the gradients itself, so replicas are compared after the first steps:
digests of the parameters are part of the next exchange (:mod:`pipollux_hybrid.job.self_checks`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.errors import ConfigurationError, SynchronizationError
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.sync.parameter_check import CHECKED, Held, are_alike, held
from pipollux_hybrid.warning import warn
from pipollux_utils.text import count

from .adaptive_optimizer import NO_BACKWARD

LOSS_PAGE = "docs/howto/losses.md#parameters-of-the-loss"


class ForeignSteps:
    """Watches steps of other optimizers, and steps of the model's without the model's backward.

    Args:
        ctx: The job.
        module: The layers.
        optimizer: The one given to HybridParallel.
        is_stepping: Whether it is in its own step, which may call others.
    """

    def __init__(
        self,
        ctx: JobContext,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        is_stepping: Callable[[], bool],
    ) -> None:
        self._context, self._optimizer, self._is_stepping = ctx, optimizer, is_stepping
        self._own = set(map(id, module.parameters()))
        self._steps, self._looked = 0, False
        self._held: dict[str, Held] = {}
        """The parameters of the first foreign steps, after them, by step and number."""
        self._digest = 0
        ctx.control.checks.append(self)
        for register, hook in (
            (register_optimizer_step_pre_hook, self._before),
            (register_optimizer_step_post_hook, self._after),
        ):
            ctx.closers.append(register(hook).remove)

    def check_backward(self) -> Callable[[], None] | None:
        """Check a step of the model's optimizer that no backward of the model precedes; return what
        to call after it, if anything.

        Raises:
            SynchronizationError: It would take a part of a batch for all of it.
        """
        if not _with_gradients(self._optimizer):
            return None
        if self._context.batch.accumulates:
            raise SynchronizationError(
                "optimizer.step() was called on an accumulation step with gradients that did not "
                "come from a backward of the wrapped model: call the model that HybridParallel(…) "
                "returns, and not the module inside"
            )
        return lambda: self._note(self._optimizer)

    def rejoined(self) -> None:
        """Compare again, as replicas that join do not get the parameters of other optimizers."""
        self._steps, self._held, self._digest = 0, {}, 0

    def digest(self) -> int:
        """Return a digest of the parameters after the first foreign steps; 0 without any."""
        return self._digest

    def content(self) -> bytes:
        """Return them as JSON."""
        return json.dumps({"steps": self._steps, "held": self._held}).encode()

    def compare(self, contents: Sequence[bytes], word: str) -> None:
        """Raise a SynchronizationError if all processes have stepped alike, and differ."""
        everyone = [json.loads(content) for content in contents]
        if len({one["steps"] for one in everyone}) > 1:
            self._digest = 0  # one of them trains something alone, such as a probe
            return
        for name in dict.fromkeys(name for one in everyone for name in one["held"]):
            row = [Held(*one["held"][name]) if name in one["held"] else None for one in everyone]
            if not are_alike(row, exact=False):
                raise SynchronizationError(
                    f"{word}s differ in {name}, as its gradients were not averaged: that is done "
                    "for parameters of the wrapped model, in backwards from its output; call the "
                    "model that HybridParallel(…) returns and not the module inside, put "
                    f"parameters of a loss into the model ({LOSS_PAGE}), or average the gradients "
                    "of other models before their step (pipollux.all_reduce_sum)"
                )

    def _before(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._is_foreign(optimizer):
            return
        parameters, kind = _with_gradients(optimizer), type(optimizer).__name__
        if any(id(parameter) in self._own for parameter in parameters):
            given = type(self._optimizer).__name__
            raise ConfigurationError(
                f"another optimizer ({kind}) than the {given} given to HybridParallel steps "
                "parameters of the model: checkpoints do not hold its state, and it would step on "
                "accumulation steps; use one optimizer, change the options of its param_groups, "
                "and add parameters with add_param_group, or call the other one in its step()"
            )
        if parameters and self._context.batch.accumulates:
            raise ConfigurationError(
                f"another optimizer ({kind}, over {count(len(parameters), 'parameter')}) than that "
                "given to HybridParallel steps on an accumulation step, with the gradients of a "
                f"part of the batch: put parameters of a loss into the model ({LOSS_PAGE}), or "
                "leave out gradient_accumulation=True"
            )

    def _after(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_foreign(optimizer) and _with_gradients(optimizer):
            self._note(optimizer)
            self._look_for_state(optimizer)

    def _look_for_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once if no checkpoint holds the state of another optimizer."""
        if self._looked or self._context.env.checkpoint_dir is None:
            return
        self._looked = True
        states = self._context.component(States).values()
        if not any(state.may_hold_schedule for state in states):
            kind = type(optimizer).__name__
            warn(
                f"an optimizer ({kind}) that is not given to HybridParallel is in no checkpoint, "
                "nor are its parameters: a restart begins with others; call "
                'pipollux.register_for_checkpointing("name", …) for the optimizer and for the '
                "module of its parameters"
            )

    def _is_foreign(self, optimizer: torch.optim.Optimizer) -> bool:
        # Steps in a backward are found where the gradients are (`sync.hook_watch`).
        in_backward = torch._C._current_graph_task_id() != NO_BACKWARD
        return not (optimizer is self._optimizer or self._is_stepping() or in_backward)

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        if self._context.env.num_replicas == 1 or self._steps >= CHECKED:
            return
        self._steps += 1
        kind = type(optimizer).__name__
        for number, parameter in enumerate(_with_gradients(optimizer)):
            name = f"{kind}, parameter {number} of shape {tuple(parameter.shape)}"
            name = f"{name}, after its step {self._steps}"
            self._held[name] = held(name, parameter.detach())
        self._digest = zlib.crc32(self.content())


def _with_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    groups: Iterable[dict[str, Any]] = optimizer.param_groups
    return [p for group in groups for p in group["params"] if p.grad is not None]
