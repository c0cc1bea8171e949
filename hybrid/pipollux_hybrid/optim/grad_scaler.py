"""Loss scaling for float16 that supports accumulation steps and noise measurements.

The range of float16 is too short for small gradients, so the loss is multiplied by a scale before
the backward and gradients are divided by it before the step (Micikevicius et al., Mixed Precision
Training, ICLR 2018). Gradients kept over accumulation steps, averaged over replicas and measured
for their noise carry the scale throughout, so it may change between iterations only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job import context as contexts

from .adaptive_optimizer import adaptive_of


class GradScaler(torch.amp.GradScaler):
    """PyTorch's GradScaler, with the same arguments and methods, for loops over HybridParallel.

    ``scale`` always scales. ``unscale_``, ``step`` and ``update`` do nothing on accumulation steps
    and act once an iteration, so the loop body stays the usual one. An iteration whose gradients
    are not finite is left out: no step, no progress, no noise, and gradients start from zero. As
    gradients are averaged over the replicas first, all replicas skip the same iterations and their
    scales stay equal.

    Example::

        scaler = GradScaler("cuda")
        for inputs, targets in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = loss_fn(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)  # only to read gradients, for instance to clip them
            model.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()

    Its ``state_dict`` holds the scale and the number of good steps since it changed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._between = False
        job = contexts.current()
        if job is not None and job.mesh is not None and self._enabled:
            raise ConfigurationError(
                "GradScaler scales a loss before its backward, and in a multi-process pipeline "
                "train_step computes both: train in bfloat16, which needs no scaling, or with one "
                "process per replica"
            )

    def scale(self, outputs: Tensor | Iterable[Tensor]) -> Any:
        """Multiply a loss, or several, by the scale."""
        scaled = super().scale(outputs)
        job = contexts.current()
        if job is not None and self._enabled:
            # The tensor, not its value, whose read would wait for the GPU.
            job.batch.loss_scale = self._scale
        return scaled

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale; once an iteration, not on accumulation steps."""
        if self._complete(optimizer):
            super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer if the gradients are finite; not on accumulation steps."""
        adaptive = adaptive_of(optimizer)
        if adaptive is None or not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        if not self._complete(optimizer):
            adaptive.leave_kept_gradients()
            return None
        before = adaptive.num_steps
        with adaptive.unscaled():
            result = super().step(optimizer, *args, **kwargs)
        if adaptive.num_steps == before:
            adaptive.skip_step()
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale, or set it; at the end of an iteration, not on accumulation steps."""
        if not self._between:
            super().update(new_scale)

    def _complete(self, optimizer: torch.optim.Optimizer) -> bool:
        adaptive = adaptive_of(optimizer)
        complete = adaptive is None or adaptive.is_complete
        self._between = not complete
        return complete
