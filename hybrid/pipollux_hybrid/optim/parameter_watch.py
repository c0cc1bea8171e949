"""Checks that a wrapped model still has its layers and parameters.

A layer or parameter that replaces one later would not be trained, as the pipeline runs the layers
it was created with, and a foreign parameter of the optimizer would not be saved.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from pipollux_hybrid.checkpoint.parameter_groups import foreign_parameter
from pipollux_hybrid.errors import ConfigurationError

__all__ = ["ParameterWatch"]

LOOKED_AT = 8
"""Submodules checked per step, which takes microseconds; large models are checked in turn."""


class _Place(NamedTuple):
    name: str
    module: nn.Module
    held: tuple[int, ...]


class ParameterWatch:
    """Refuses foreign layers and parameters, also in the optimizer's ``add_param_group``."""

    def __init__(self, module: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        self._module = module
        self._optimizer = optimizer
        self._layers = list(module._modules.values())
        self._places = [_Place(name, x, _held(x)) for name, x in module.named_modules()]
        self._next = 0
        self._known = set(map(id, module.parameters()))
        self._count = _count(optimizer)
        self._patch()

    def check(self) -> None:
        """Raise a ConfigurationError for a foreign layer or parameter; cheap, for every pass."""
        # Lists compare their items by identity first, so this is fast.
        if list(self._module._modules.values()) != self._layers:
            self._refuse_layer()
        first = self._next
        for place in self._places[first : first + LOOKED_AT]:
            if _held(place.module) != place.held:
                self._refuse_parameter(place)
        self._next = first + LOOKED_AT if first + LOOKED_AT < len(self._places) else 0
        if _count(self._optimizer) != self._count:
            self._check_groups()

    def _patch(self) -> None:
        present = self._optimizer.add_param_group
        # A second HybridParallel over the optimizer, as in a notebook, replaces the patch.
        original = getattr(present, "_pipollux_original", present)

        @functools.wraps(original)
        def add_param_group(_: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
            given = param_group["params"]
            if not isinstance(given, torch.Tensor | set):
                given = param_group["params"] = list(given)  # it may be an iterator
            for item in [given] if isinstance(given, torch.Tensor) else given:
                # torch also accepts pairs of a name and a parameter.
                self._check_known(item[1] if isinstance(item, tuple) else item)
            original(param_group)

        add_param_group._pipollux_original = original  # type: ignore[attr-defined]  # see above
        method = MethodType(add_param_group, self._optimizer)
        self._optimizer.add_param_group = method  # type: ignore[method-assign]  # to refuse at once

    def _check_groups(self) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                self._check_known(parameter)
        self._count = _count(self._optimizer)

    def _check_known(self, parameter: object) -> None:
        if id(parameter) not in self._known:
            raise foreign_parameter(parameter)

    def _refuse_layer(self) -> None:
        now, count = dict(self._module._modules), len(self._layers)
        if len(now) != count:
            change = f"the module had {count} layers when it was wrapped and has {len(now)} now"
        else:
            pairs = zip(now.items(), self._layers, strict=True)
            name, new, old = next((n, new, old) for (n, new), old in pairs if new is not old)
            change = (
                f"layer {name!r} was a {type(old).__name__} when the module was wrapped and is "
                f"another {type(new).__name__} now"
            )
        raise ConfigurationError(
            f"{change}: the pipeline and the optimizer keep the layers they were made with, so "
            "change the module before HybridParallel(…), or copy new values into the layer it has"
        )

    def _refuse_parameter(self, place: _Place) -> None:
        where = f"layer {place.name!r} ({type(place.module).__name__})"
        raise ConfigurationError(
            f"{where} has other parameters or submodules than when the module was wrapped: the "
            "pipeline and the optimizer keep those they were made with, so change the module "
            "before HybridParallel(…), or copy new values into the parameters it has"
        )


def _held(module: nn.Module) -> tuple[int, ...]:
    return (*map(id, module._parameters.values()), *map(id, module._modules.values()))


def _count(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
