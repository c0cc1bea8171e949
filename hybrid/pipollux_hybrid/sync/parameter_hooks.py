"""Hooks on parameters, installed only while something depends on when gradients arrive.

A Python hook takes some microseconds per gradient, which matters in a step of a few milliseconds.
So hooks are set for backwards that count or measure; others compare the gradients before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipollux_hybrid.errors import SynchronizationError
from pipollux_hybrid.job.context import current

__all__ = ["ParameterHooks", "Watched", "refuse_sparse"]

Named = Sequence[Sequence[tuple[str, nn.Parameter]]]


class ParameterHooks:
    """The hooks of all stages' parameters, removed when the job ends: called as (stage index, name,
    parameter, gradient) before a gradient is added, and as (stage, name, parameter) after it.
    """

    def __init__(
        self,
        on_gradient: Callable[[int, str, nn.Parameter, Tensor], None],
        on_arrival: Callable[[int, str, nn.Parameter], None],
    ) -> None:
        self._on_gradient = on_gradient
        self._on_arrival = on_arrival
        self._gradients: dict[nn.Parameter, RemovableHandle] = {}
        self._arrivals: dict[nn.Parameter, RemovableHandle] = {}
        if (ctx := current()) is not None:
            # Hooks and parameters refer to each other and would never be freed.
            ctx.closers.append(lambda: self.set((), gradients=False, arrivals=False))

    def set(self, stages: Named, *, gradients: bool, arrivals: bool) -> None:
        """Install these hooks on the parameters of the stages, and remove all others."""
        _adjust(self._gradients, stages if gradients else (), self._hook_gradient)
        _adjust(self._arrivals, stages if arrivals else (), self._hook_arrival)

    def _hook_gradient(self, stage: int, name: str, parameter: nn.Parameter) -> RemovableHandle:
        hook = partial(self._on_gradient, stage, name, parameter)
        handle: RemovableHandle = parameter.register_hook(hook)
        return handle

    def _hook_arrival(self, stage: int, name: str, parameter: nn.Parameter) -> RemovableHandle:
        hook = partial(self._on_arrival, stage, name)
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
        return handle


def _adjust(
    handles: dict[nn.Parameter, RemovableHandle], stages: Named, hook: Callable[..., Any]
) -> None:
    if not stages:
        for handle in handles.values():
            handle.remove()
        handles.clear()
    for index, named in enumerate(stages):
        for name, parameter in named:
            if parameter not in handles:
                handles[parameter] = hook(index, name, parameter)


class Watched:
    """Gradients as they were before a backward, to be compared with those after it."""

    def __init__(self, stages: Named) -> None:
        self._stages = stages
        self._before = [_state(p.grad) for named in stages for _, p in named]

    def changed(self) -> bool:
        """Return whether any gradient has arrived; a sparse one is a SynchronizationError."""
        changed, before = False, iter(self._before)
        for index, named in enumerate(self._stages):
            for name, parameter in named:
                gradient, version = next(before)
                now = parameter.grad
                if now is not gradient or (now is not None and now._version != version):
                    refuse_sparse(index, name, now)
                    changed = True
        return changed


def _state(gradient: Tensor | None) -> tuple[Tensor | None, int]:
    return gradient, 0 if gradient is None else gradient._version


def refuse_sparse(stage: int, name: str, gradient: Tensor | None) -> None:
    """Refuse a sparse gradient with a SynchronizationError that names the parameter."""
    if gradient is not None and gradient.is_sparse:
        raise SynchronizationError(
            f"parameter {name!r} of stage {stage} has a sparse gradient, which is not averaged: "
            "create its embedding with sparse=False"
        )
