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

from .adaptive_optimizer import AdaptiveOptimizer, adaptive_of


class GradScaler(torch.amp.GradScaler):
    """PyTorch's GradScaler, with the same arguments and methods, for loops over HybridParallel.

    ``scale`` always scales. ``unscale_``, ``step`` and ``update`` do nothing on accumulation steps
    and act once an iteration, so the loop body stays the usual one. An iteration whose gradients
    are not finite is left out: no step, no progress, no noise, and gradients start from zero. As
    gradients are averaged over the replicas first, all replicas skip the same iterations and their
    scales stay equal, and so do all stages of a multi-process pipeline.

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

    With :meth:`HybridParallel.train_step`, which runs the backward itself, pass
    ``grad_scaler=scaler`` instead of calling ``scale``.

    Its ``state_dict`` holds the scale and the number of good steps since it changed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._between = False
        self._multiplied = False
        """Whether a loss of the current iteration was multiplied by the scale."""

    def scale(self, outputs: Tensor | Iterable[Tensor]) -> Any:
        """Multiply a loss, or several, by the scale."""
        scaled = super().scale(outputs)
        job = contexts.current()
        if job is not None and self._enabled:
            # The tensor, not its value, whose read would wait for the GPU.
            job.batch.loss_scale = self._scale
        self._multiplied = True
        return scaled

    def factor(self, device: torch.device) -> Tensor | None:
        """Return the scale on a device for the losses of a ``train_step``; None if disabled."""
        if not self._enabled:
            return None
        factor: Tensor = self.scale(torch.ones((), device=device))
        return factor

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale; once an iteration, not on accumulation steps."""
        if not self._complete(optimizer):
            return
        adaptive = adaptive_of(optimizer) if self._enabled else None
        if adaptive is not None:
            self._check_multiplied()
        super().unscale_(optimizer)
        if adaptive is not None:
            self._agree(optimizer, adaptive)

    def _check_multiplied(self) -> None:
        if not self._multiplied:
            raise ConfigurationError(
                "the gradients of this iteration were not multiplied by the scale of this "
                "GradScaler: write scaler.scale(loss).backward(), or, with train_step, "
                "model.train_step(inputs, targets, loss_fn, grad_scaler=scaler)"
            )

    def _agree(self, optimizer: torch.optim.Optimizer, adaptive: AdaptiveOptimizer) -> None:
        """Let all stages of the replica find gradients that are not finite if any of them does."""
        job, state = contexts.current(), self._per_optimizer_states[id(optimizer)]
        assert self._scale is not None  # noqa: S101  # the iteration was scaled
        if job is None or job.env.world_size == 1:
            return
        found: dict[torch.device, Tensor] = state["found_inf_per_device"]
        numbers = [x.to(self._scale.device, torch.float64) for x in found.values()]
        scale, *here = torch.stack([self._scale.double(), *numbers]).tolist()
        adaptive.loss_scale = scale
        if job.mesh is None:
            return
        call = f"scaler.unscale_(optimizer) or scaler.step(optimizer) at the scale {scale:g}"
        anywhere = max(job.mesh.calls.meet(call, number=max(here, default=0.0)))
        # A stage without gradients has found nothing, which torch does not expect.
        for flag in found.values():
            flag.fill_(anywhere)
        state["found_inf_per_device"] = found or {
            self._scale.device: torch.full((), anywhere, device=self._scale.device)
        }

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer if the gradients are finite; not on accumulation steps."""
        adaptive = adaptive_of(optimizer)
        if adaptive is None or not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        if not self._complete(optimizer):
            adaptive.leave_kept_gradients()
            return None
        self._check_multiplied()
        before = adaptive.num_steps
        with adaptive.unscaled():
            result = super().step(optimizer, *args, **kwargs)
        if adaptive.num_steps == before:
            adaptive.skip_step()
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale, or set it; at the end of an iteration, not on accumulation steps."""
        if not self._between:
            self._multiplied = False
            super().update(new_scale)

    def _complete(self, optimizer: torch.optim.Optimizer) -> bool:
        adaptive = adaptive_of(optimizer)
        complete = adaptive is None or adaptive.is_complete
        self._between = not complete
        return complete


def scale_of(scaler: torch.amp.GradScaler | None, device: torch.device) -> Tensor | None:
    """Return a scaler's scale on a device, None without an enabled scaler; a ConfigurationError
    unless it is a :class:`GradScaler`.
    """
    if scaler is None:
        return None
    if not isinstance(scaler, GradScaler):
        raise ConfigurationError(
            f"grad_scaler is a {type(scaler).__module__}.{type(scaler).__name__}: use "
            "pipollux.GradScaler, with the same arguments as torch.amp.GradScaler"
        )
    return scaler.factor(device)
