"""The optimizer inside an adaptive loop: steps when an iteration is complete, at the scaled rate.

The loop body calls ``zero_grad``, ``backward`` and ``step`` for every atomic batch. On accumulation
steps the two optimizer calls do nothing, as in AdaptDL. The same holds for the learning-rate
scheduler of HybridParallel.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from pipollux_hybrid.checkpoint.optimizer_shards import OptimizerShards
from pipollux_hybrid.errors import ConfigurationError, SynchronizationError

from .kept_gradients import KeptGradients
from .scaling_rules import is_adam_like
from .sharded_step import ShardedStep

ADAM_WARMUP = 5
"""Steps before Adam's second moment reflects the geometry, as in AdaptDL."""
NO_BACKWARD = -1
"""Value of autograd's graph task id outside of a backward."""
REFRESH = 10
"""Steps for which a preconditioner is reused: Adam's second moment changes by some 1 % in them."""


_adaptive: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[AdaptiveOptimizer]] = (
    weakref.WeakKeyDictionary()
)


def adaptive_of(optimizer: torch.optim.Optimizer) -> AdaptiveOptimizer | None:
    """Return the wrapper of an optimizer; None if HybridParallel did not wrap it."""
    found = _adaptive.get(optimizer)
    return found() if found is not None else None


class AdaptiveOptimizer:
    """Patches ``step`` and ``zero_grad`` of an optimizer whose ``step`` needs no closure.

    Args:
        optimizer: The optimizer.
        is_complete: Returns whether the gradients of an iteration are complete.
        factor: Returns the factor on the learning rate of the next step.
        on_step: Called after each real step.
        before_step: Called before each; returns a function to call after it, or None.
        shards: Division of the optimizer state; None: every replica holds everything.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        is_complete: Callable[[], bool],
        factor: Callable[[], float],
        on_step: Callable[[], None],
        before_step: Callable[[], Callable[[], None] | None] = lambda: None,
        shards: OptimizerShards | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._sharded = None if shards is None else ShardedStep(optimizer, shards)
        self._is_complete = is_complete
        self._factor = factor
        self._on_step, self._before_step = on_step, before_step
        self.is_stepping = False
        """Whether the optimizer is in its own step, which may call those of others."""
        self._may_zero = True
        self._trained: object = None
        """The pass over a batch whose backward was the last, without a step after it."""
        self._discarded: object = None
        """The same, once the script has reset the gradients of that backward."""
        self._kept = KeptGradients(optimizer)
        self._adam = is_adam_like(optimizer)
        self._preconditioners: dict[nn.Parameter, Tensor] = {}
        self._warm: set[nn.Parameter] = set()
        """Parameters whose second moment reflects the geometry."""
        self._groups: dict[nn.Parameter, int] = {}
        self._steps_used = 0
        self.num_steps = 0
        """Real steps taken by this object."""
        self.loss_scale: float | None = None
        """Scale of the last gradients that a GradScaler unscaled in this membership."""
        self._patch_step()
        self._patch_zero_grad()
        self._expect_scalers()
        # A second HybridParallel over the optimizer, as in a notebook, replaces this entry.
        _adaptive[optimizer] = weakref.ref(self)  # weak, as self references the key

    @property
    def may_zero(self) -> bool:
        """Whether gradients may be reset: not between accumulation steps, but also if the script
        has skipped the step of a complete iteration.
        """
        return self._may_zero or self._is_complete()

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of an iteration are complete, so that the optimizer may step."""
        return self._is_complete()

    def preconditioner(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the weights of squares in Adam's geometry, 1 / (√v̂ + ε)², like the parameter, or
        of shape [..., 2] if it is complex; None for other optimizers and in the first steps.

        On a CPU they are cached for some steps; on a GPU they are recomputed, which costs less than
        the memory.
        """
        if not self._adam:
            return None
        kept = self._preconditioners.get(parameter)
        if kept is not None:
            return kept
        if self._sharded is not None and self._sharded.active:
            return None  # shared before; a backward cannot fetch it from its owner
        weights = self._weights(parameter)
        if weights is not None and not parameter.is_cuda:
            self._preconditioners[parameter] = weights
        return weights

    def preconditioners(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """Return :meth:`preconditioner` of parameters."""
        if not self._adam:
            return [None] * len(parameters)
        return [self.preconditioner(parameter) for parameter in parameters]

    def share_preconditioners(self) -> None:
        """Fetch others' weights of squares before a measured iteration; all replicas call it."""
        if self._adam and self._sharded is not None and self._sharded.active:
            self._preconditioners |= self._sharded.exchange(self._weights, self._preconditioners)

    def _weights(self, parameter: nn.Parameter) -> Tensor | None:
        state = self.optimizer.state.get(parameter, {})
        step = state.get("step", 0)
        if parameter not in self._warm:
            if float(step) < ADAM_WARMUP:
                return None
            self._warm.add(parameter)
        group = self._group_of(parameter)
        moment: Tensor = state["exp_avg_sq"]
        if moment.is_complex():  # Adam treats a complex number as two real ones
            moment = torch.view_as_real(moment)
        if isinstance(step, Tensor) and step.is_cuda:  # of a fused optimizer; avoids a GPU sync
            divisor = moment.sqrt().div_((1.0 - float(group["betas"][1]) ** step).sqrt())
        else:
            divisor = moment.sqrt().div_(math.sqrt(1.0 - float(group["betas"][1]) ** float(step)))
        return divisor.add_(group["eps"]).square_().reciprocal_()

    def _group_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        if parameter not in self._groups:
            groups = self.optimizer.param_groups
            self._groups = {p: number for number, g in enumerate(groups) for p in g["params"]}
        return self.optimizer.param_groups[self._groups[parameter]]

    def _patch_step(self) -> None:
        original = self.optimizer.step

        @functools.wraps(original)
        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if closure is not None:
                raise ConfigurationError(
                    "optimizer.step(closure) evaluates the loss more than once an iteration, which "
                    "adaptive batch sizes do not allow: call backward() and then step()"
                )
            if torch._C._current_graph_task_id() != NO_BACKWARD:
                raise SynchronizationError(
                    "optimizer.step() was called by a hook in the backward, where gradients are "
                    "those of single micro-batches, and not yet averaged over replicas: call it "
                    "after the backward"
                )
            self._refuse_foreign_scaler()
            self._trained = self._discarded = None
            if not self._is_complete():
                self._kept.check()
                return None
            self._kept.check_rates()
            after = self._before_step()
            self.is_stepping = True
            try:
                result = self._scaled(self._own(original))
            finally:
                self.is_stepping = False
            if after is not None:
                after()
            self._may_zero = True
            self.num_steps += 1
            self._steps_used += 1
            kept = self._preconditioners
            if not kept or self._steps_used >= REFRESH or next(iter(kept)).is_cuda:
                kept.clear()
                self._steps_used = 0
            self._on_step()
            return result

        # A bound method, as later schedulers expect one.
        self.optimizer.step = MethodType(step, self.optimizer)  # type: ignore[method-assign]  # the purpose of this class

    def _expect_scalers(self) -> None:
        """Make torch's GradScaler visible, by its protocol with optimizers that unscale."""
        self.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # torch's own protocol with fused optimizers

    def _refuse_foreign_scaler(self) -> None:
        if getattr(self.optimizer, "found_inf", None) is not None:
            raise ConfigurationError(
                "scaler is a torch.amp.GradScaler, which does not support accumulation steps and "
                "whose scale would be mistaken for the gradient's noise: use "
                "pipollux.GradScaler, with the same arguments"
            )

    @contextmanager
    def unscaled(self) -> Iterator[None]:
        """Mark the gradients of steps within as already unscaled by a GradScaler."""
        self.optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # see above
        try:
            yield
        finally:
            self.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # see above

    def rejoin(self) -> None:
        """Reset the preconditioners as after a restart, as joining replicas have none."""
        self._preconditioners.clear()
        self._warm.clear()
        self.loss_scale = None
        self._steps_used, self._may_zero = 0, True

    def skip_step(self) -> None:
        """End the iteration without a step, as its gradients were not finite."""
        self._may_zero = True
        self._trained = self._discarded = None
        # Else a scheduler would warn that the optimizer never steps.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # read by schedulers

    def follow(self, lr_scheduler: Any) -> None:
        """Make a learning-rate scheduler, any object with a ``step``, skip accumulation steps. Its
        class is replaced by a subclass, as an attribute of the object would become part of its
        ``state_dict``.
        """
        if lr_scheduler is None:
            return
        kind = type(lr_scheduler)
        if getattr(kind, "_pipollux_follows", None) is not None:
            kind = kind.__mro__[1]
        adaptive = self

        @functools.wraps(kind.step)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            return kind.step(scheduler, *args, **kwargs) if adaptive.is_complete else None

        names = {"step": step, "_pipollux_follows": True, "__module__": kind.__module__}
        lr_scheduler.__class__ = type(kind.__name__, (kind,), names)

    def _own(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Return a step of this replica's parameters that also receives the others'."""
        return step if self._sharded is None else functools.partial(self._sharded.step, step)

    def _scaled(self, step: Callable[[], Any]) -> Any:
        factor = self._factor()
        if factor == 1.0:
            return step()
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        try:
            return step()
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _patch_zero_grad(self) -> None:
        original = self.optimizer.zero_grad

        @functools.wraps(original)
        def zero_grad(_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            self.note_zero_grad()
            # The next loop body must not reset gradients of accumulation steps.
            if self.may_zero:
                original(set_to_none=set_to_none)

        self.optimizer.zero_grad = MethodType(zero_grad, self.optimizer)  # type: ignore[method-assign]  # as above

    def note_zero_grad(self) -> None:
        """Record that the script resets gradients, whether or not it may."""
        self._discarded = self._trained

    def end_backward(self, part: object, *, accumulates: bool, is_divided: bool) -> None:
        """Check that the gradients will be those of a whole batch.

        Args:
            part: The pass of the loop body.
            accumulates: Whether it is an accumulation step.
            is_divided: Whether the batch has several passes.

        Raises:
            SynchronizationError: Parameters have changed between two passes, or gradients were
                reset between two backwards of this one.
        """
        if accumulates:
            self._kept.hold_parameters()
        else:
            self._kept.release_parameters()
        if is_divided and part is not None and self._discarded is part:
            raise SynchronizationError(
                "gradients were reset between two backwards of one pass over a batch that has "
                "several (accumulation steps): zero_grad() keeps or drops those of all passes, so "
                "the first backward's would not be left out alone; compute gradients of inputs by "
                "torch.autograd.grad with activation_checkpoint='never', or leave out "
                "gradient_accumulation=True"
            )
        self._trained = part

    def keep_gradients(self, *, watched: bool = True) -> None:
        """Make ``zero_grad`` do nothing until the next step; if ``watched``, warn of changes."""
        self._may_zero = False
        if watched:
            self._kept.note()

    def leave_kept_gradients(self) -> None:
        """Skip a GradScaler's step on an accumulation step."""
        self._trained = self._discarded = None
        self._kept.check()
