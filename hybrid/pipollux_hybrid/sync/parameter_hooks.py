"""Hooks on parameters, there only while something depends on when gradients arrive.

A hook in Python takes some microseconds at every gradient, which is much in a step of a few
milliseconds. So they are set for the backwards that count or measure, and taken away for others,
where comparing the gradients before and after is enough.
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
"""Names and parameters of each stage."""


class ParameterHooks:
    """The hooks of all stages' parameters, gone when the job ends.

    Args:
        on_gradient: Called as (stage index, name, parameter, gradient) with each gradient before it
            is added to what the parameter has.
        on_arrival: Called as (stage index, name, parameter) after it was added.
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
            # They hold what they call, which holds the parameters: all would stay for ever.
            ctx.closers.append(lambda: self.set((), gradients=False, arrivals=False))

    def set(self, stages: Named, *, gradients: bool, arrivals: bool) -> None:
        """Have these hooks on the parameters of the stages from now on, and no others."""
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
    """Gradients as they were before a backward, to be compared with those after it.

    Args:
        stages: Names and parameters of each stage.
    """

    def __init__(self, stages: Named) -> None:
        self._stages = stages
        self._before = [_state(p.grad) for named in stages for _, p in named]

    def changed(self) -> bool:
        """Return whether any parameter has received a gradient since.

        Raises:
            SynchronizationError: One has a sparse gradient.
        """
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
    """Refuse a sparse gradient.

    Raises:
        SynchronizationError: It is one; the message names the parameter.
    """
    if gradient is not None and gradient.is_sparse:
        raise SynchronizationError(
            f"parameter {name!r} of stage {stage} has a sparse gradient, which is not averaged: "
            "create its embedding with sparse=False"
        )
