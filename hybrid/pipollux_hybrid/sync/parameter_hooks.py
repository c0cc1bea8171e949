"""Hooks on parameters, installed only while something depends on when gradients arrive.

A Python hook takes some microseconds per gradient, which matters in a step of a few milliseconds.
So hooks are set for backwards that count or measure; others compare the gradients before and after.
Those that count are on all parameters, not only on the last one of each bucket: which one that is
depends on the graph, and gradients that come after it would be missed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipollux_hybrid.errors import SynchronizationError
from pipollux_hybrid.job.context import current

Named = Sequence[Sequence[tuple[str, nn.Parameter]]]


@dataclass(frozen=True, eq=False)
class Trained:
    """The parameters of all stages that require gradients."""

    flags: list[bool]
    """For each parameter, in the order of stages, whether it does."""
    stages: list[list[tuple[int, str, nn.Parameter]]]
    """For each stage, these parameters with their numbers, that is, their places in that order."""

    @classmethod
    def of(cls, stages: Named, known: Trained | None = None) -> Trained:
        """Return the trained parameters; ``known`` itself if it still describes them."""
        flags = [parameter.requires_grad for named in stages for _, parameter in named]
        if known is not None and flags == known.flags:
            return known
        numbers = iter(range(len(flags)))
        numbered = [[(next(numbers), name, p) for name, p in named] for named in stages]
        return cls(flags, [[item for item in some if item[2].requires_grad] for some in numbered])


NOTHING = Trained([], [])


class ParameterHooks:
    """The hooks of all stages' parameters, removed when the job ends: called as (stage index, name,
    number, parameter, gradient) before a gradient is added, and as (stage, name, number, parameter)
    after it.
    """

    def __init__(
        self,
        on_gradient: Callable[[int, str, int, nn.Parameter, Tensor], None],
        on_arrival: Callable[[int, str, int, nn.Parameter], None],
    ) -> None:
        self._on_gradient = on_gradient
        self._on_arrival = on_arrival
        self._installed = NOTHING, False, False
        self._gradients: dict[nn.Parameter, RemovableHandle] = {}
        self._arrivals: dict[nn.Parameter, RemovableHandle] = {}
        if (ctx := current()) is not None:
            # Hooks and parameters refer to each other and would never be freed.
            ctx.closers.append(lambda: self.set(NOTHING, gradients=False, arrivals=False))

    def set(self, trained: Trained, *, gradients: bool, arrivals: bool) -> None:
        """Install these hooks on trained parameters, and remove all others."""
        if self._installed == (trained, gradients, arrivals):
            return
        self._installed = trained, gradients, arrivals
        _adjust(self._gradients, trained if gradients else NOTHING, self._hook_gradient)
        _adjust(self._arrivals, trained if arrivals else NOTHING, self._hook_arrival)

    def _hook_gradient(
        self, stage: int, name: str, number: int, parameter: nn.Parameter
    ) -> RemovableHandle:
        hook = partial(self._on_gradient, stage, name, number, parameter)
        handle: RemovableHandle = parameter.register_hook(hook)
        return handle

    def _hook_arrival(
        self, stage: int, name: str, number: int, parameter: nn.Parameter
    ) -> RemovableHandle:
        hook = partial(self._on_arrival, stage, name, number)
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
        return handle


def _adjust(
    handles: dict[nn.Parameter, RemovableHandle], trained: Trained, hook: Callable[..., Any]
) -> None:
    if trained is NOTHING:
        for handle in handles.values():
            handle.remove()
        handles.clear()
    for index, some in enumerate(trained.stages):
        for number, name, parameter in some:
            if parameter not in handles:
                handles[parameter] = hook(index, name, number, parameter)


class Watched:
    """Gradients as they were before a backward, to be compared with those after it."""

    def __init__(self, stages: Named) -> None:
        self._stages = stages
        gradients = [parameter.grad for named in stages for _, parameter in named]
        self._before = [(g, 0 if g is None else g._version) for g in gradients]

    def changed(self) -> bool:
        """Return whether any gradient has arrived; a sparse one is a SynchronizationError."""
        changed, before = False, iter(self._before)
        for index, named in enumerate(self._stages):
            for (name, parameter), (gradient, version) in zip(named, before, strict=False):
                now = parameter.grad
                if now is not gradient or (now is not None and now._version != version):
                    if now is not None and now.is_sparse:
                        refuse_sparse(index, name, now)
                    changed = True
        return changed


def refuse_sparse(stage: int, name: str, gradient: Tensor | None) -> None:
    """Refuse a sparse gradient with a SynchronizationError that names the parameter."""
    if gradient is not None and gradient.is_sparse:
        raise SynchronizationError(
            f"parameter {name!r} of stage {stage} has a sparse gradient, which is not averaged: "
            "create its embedding with sparse=False"
        )
