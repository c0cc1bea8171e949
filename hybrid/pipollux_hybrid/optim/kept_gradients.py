"""Warns scripts that change gradients or learning rates before accumulation is complete.

``torch.nn.utils.clip_grad_norm_`` in the loop body would clip parts of the batch, and earlier parts
repeatedly, without a trace; a scheduler that HybridParallel does not know would step once per part.
Autograd counts in-place changes of a tensor, so comparing two integers detects it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipollux_hybrid.errors import SynchronizationError
from pipollux_hybrid.warning import warn


class KeptGradients:
    """Warns, once, if a script changes the first or last gradient on an accumulation step, or a
    learning rate after it; refuses changes of parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._versions: dict[torch.Tensor, int] = {}
        self._hooked: set[torch.Tensor] = set()
        self._rates: list[Any] = []
        """Learning rates on the last accumulation step of this iteration."""
        self._held: tuple[nn.Parameter, int, torch.Tensor] | None = None
        """A parameter, its version and its values."""
        self._small: nn.Parameter | None = None
        """A smallest one that is trained."""
        self._warned = self._warned_of_rates = False

    def note(self) -> None:
        """Record the gradients' versions at the end of an accumulation step's backward."""
        if self._warned:
            return
        ends = {p for p in (self._end(1), self._end(-1)) if p is not None}
        self._versions = dict.fromkeys(ends, 0)
        for parameter in ends:
            self._follow(parameter)
            if parameter not in self._hooked:
                # A penalty on the parameters may have a separate backward without the model.
                self._hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(self._follow)

    def check(self) -> None:
        """Check the gradients when the script calls ``step`` on an accumulation step."""
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        seen, self._versions = self._versions, {}
        if any(p.grad is None or p.grad._version != version for p, version in seen.items()):
            self._warned = True
            warn(
                "gradients were changed on an accumulation step, between backward() and "
                "optimizer.step(), before those of the whole batch were complete: clip with "
                "model.clip_grad_norm_(max_norm) instead of torch.nn.utils.clip_grad_norm_, and "
                "reset them with optimizer.zero_grad() instead of the module's",
            )

    def hold_parameters(self) -> None:
        """Record a parameter at the end of an accumulation step's backward."""
        self.release_parameters()
        if self._small is None or self._small.grad is None:
            groups = self._optimizer.param_groups
            params = (p for group in groups for p in group["params"])
            trained = [p for p in params if p.grad is not None and p.numel() > 0]
            self._small = min(trained, key=torch.numel, default=None)  # as it is copied
        if self._small is not None:
            self._held = self._small, self._small._version, self._small.detach().clone()

    def release_parameters(self) -> None:
        """Raise a SynchronizationError if it has changed since the earlier part of the batch."""
        held, self._held = self._held, None
        if held is None or held[0]._version == held[1] or torch.equal(held[0].detach(), held[2]):
            return
        raise SynchronizationError(
            "parameters were changed on an accumulation step, so the parts of one batch have the "
            "gradients of different models: change them in optimizer.step(), which does nothing "
            "there, or leave out gradient_accumulation=True"
        )

    def check_rates(self) -> None:
        """Check the learning rates at the step that completes an iteration."""
        rates, self._rates = self._rates, []
        pairs = zip(rates, (group["lr"] for group in self._optimizer.param_groups), strict=False)
        changed = any(isinstance(x, float) and isinstance(y, float) and x != y for x, y in pairs)
        if changed and not self._warned_of_rates:
            self._warned_of_rates = True
            warn(
                "the learning rate was changed between two passes over one batch (accumulation "
                "steps), so a schedule runs ahead of the optimizer's steps: pass the scheduler as "
                "HybridParallel(…, lr_scheduler=scheduler), step it once per epoch, or set the "
                "rate in optimizer.register_step_post_hook(…)"
            )

    def _follow(self, parameter: torch.Tensor) -> None:
        if parameter in self._versions and parameter.grad is not None:
            self._versions[parameter] = parameter.grad._version

    def _end(self, direction: int) -> nn.Parameter | None:
        """Return the first parameter with a gradient, or the last one for direction -1."""
        groups = self._optimizer.param_groups[::direction]
        parameters = (p for group in groups for p in group["params"][::direction])
        return next((p for p in parameters if p.grad is not None), None)
