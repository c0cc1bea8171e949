"""The optimizer's parameter groups by names of parameters, across restarts.

A script may first train only some layers and add the others in a later epoch, with
``add_param_group``. A restarted script begins with the initial groups; later ones are recreated
from the checkpoint, with their settings and state. When the script then adds such a group again, as
it reruns the interrupted epoch, the existing group is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from pipollux_hybrid.errors import CheckpointError, ConfigurationError
from pipollux_hybrid.job.context import from_scratch

COMPILED = "_orig_mod"
"""Component that ``torch.compile`` adds to the names of a layer's parameters."""

RECORDED = ":"
"""In the name of a recorded layer, whose parameters have the names of the original model."""


class ParameterGroups:
    """An optimizer's groups in the form of a checkpoint.

    ``shared`` has the names in the whole module of parameters that other stages hold a copy of.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        shared: Mapping[nn.Parameter, str] | None = None,
    ) -> None:
        self._module, self._shared = module, dict(shared or {})
        self._optimizer = optimizer

    def state(self, whole: Mapping[nn.Parameter, Any] | None = None) -> dict[str, Any]:
        """Return the optimizer's state by parameter name; ``whole`` replaces a sharded state."""
        packed = self._optimizer.state_dict()
        groups = self._names()
        flat = [name for group in groups for name in group]
        state = {flat[i]: state for i, state in packed["state"].items()}
        if whole is not None:
            names = self.names()
            state = {names[parameter]: held for parameter, held in whole.items()}
        return {
            "class": type(self._optimizer).__name__,
            "state": state,
            "groups": [
                {**group, "params": names}
                for group, names in zip(packed["param_groups"], groups, strict=True)
            ],
        }

    def restore(
        self, content: Mapping[str, Any], keeps: Callable[[nn.Parameter], bool] = lambda _: True
    ) -> None:
        """Restore the result of :meth:`state` for parameters that this replica ``keeps``."""
        self.check(content)
        self._add(content["groups"][len(self._optimizer.param_groups) :])
        groups = self._names()
        flat = [name for group in groups for name in group]
        packed, first = [], 0
        for group, names in zip(content["groups"], groups, strict=True):
            packed.append({**group, "params": list(range(first, first + len(names)))})
            first += len(names)
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        state = {
            i: content["state"][name]
            for i, (name, parameter) in enumerate(zip(flat, held, strict=True))
            if name in content["state"] and keeps(parameter)
        }
        self._optimizer.load_state_dict({"state": state, "param_groups": packed})

    def check(self, content: Mapping[str, Any]) -> None:
        """Raise a CheckpointError with the first difference for another optimizer."""
        self._check_class(content)
        saved = [[plain_name(name) for name in group["params"]] for group in content["groups"]]
        self._check_groups(saved)

    def names(self) -> dict[nn.Parameter, str]:
        """Return the names of the module's parameters in the whole module."""
        named = self._module.named_parameters()
        return {p: plain_name(self._shared.get(p, name)) for name, p in named}

    def _names(self) -> list[list[str]]:
        names = self.names()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in names:  # added after the last step, which checks them
                    raise foreign_parameter(parameter)
        return [[names[p] for p in group["params"]] for group in self._optimizer.param_groups]

    def _check_class(self, content: Mapping[str, Any]) -> None:
        ours = type(self._optimizer).__name__
        theirs = content.get("class", ours)
        if theirs != ours:
            raise CheckpointError(
                f"its optimizer is {theirs} and the script's is {ours}: use {theirs}, or "
                f"{from_scratch()}"
            )

    def _check_groups(self, saved: Sequence[Sequence[str]]) -> None:
        """Refuse groups that are neither the script's nor added to them."""
        ours = self._names()
        held = {name for group in ours for name in group}
        later = [name for group in saved[len(ours) :] for name in group]
        if len(saved) < len(ours) or held & set(later):
            raise CheckpointError(
                f"its optimizer has {len(saved)} parameter groups and the script's has "
                f"{len(ours)}: build the same groups, or {from_scratch()}"
            )
        for index, (theirs, names) in enumerate(zip(saved, ours, strict=False)):
            moved = sorted(set(theirs) ^ set(names))
            if moved:
                raise CheckpointError(
                    f"group {index} of its optimizer has other parameters than the script's, the "
                    f"first being {moved[0]!r}: build the same groups, or "
                    f"{from_scratch()}"
                )

    def _add(self, later: Sequence[Mapping[str, Any]]) -> None:
        if not later:
            return
        parameters = {name: parameter for parameter, name in self.names().items()}
        made = []
        for group in later:
            tensors = [parameters[plain_name(name)] for name in group["params"]]
            # An optimizer over named parameters accepts no unnamed ones.
            named = list(zip(group.get("param_names", ()), tensors, strict=False))
            self._optimizer.add_param_group({"params": named or tensors})
            made.append(set[Any](tensors))
        _expect(self._optimizer, made)


def _expect(optimizer: torch.optim.Optimizer, made: list[set[Any]]) -> None:
    """Make ``add_param_group`` ignore each group that exists already, once."""
    original = optimizer.add_param_group

    def add_param_group(_: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        items = [params] if isinstance(params, torch.Tensor) else list(params)
        tensors = {item[1] if isinstance(item, tuple) else item for item in items}
        if tensors in made:
            made.remove(tensors)
            return
        original({**param_group, "params": items})

    optimizer.add_param_group = MethodType(add_param_group, optimizer)  # type: ignore[method-assign]  # intercepts the script's call


def foreign_parameter(parameter: object) -> ConfigurationError:
    """Return the error for an optimizer's parameter that the model does not have."""
    shape = tuple(parameter.shape) if isinstance(parameter, torch.Tensor) else None
    item = f"a parameter of shape {shape}" if shape is not None else f"a {type(parameter).__name__}"
    return ConfigurationError(
        f"the optimizer was given {item} that is not in the wrapped module, so it would neither be "
        "synchronized nor saved: give it parameters of the module only, and have all layers in the "
        "module before HybridParallel(…)"
    )


def plain_name(name: str) -> str:
    """Return the name of a parameter or buffer without the traces of ``torch.compile``, and without
    that of a recorded layer.

    Example:
        >>> plain_name("0._orig_mod.weight"), plain_name("1:h/0.h.0.weight")
        ('0.weight', 'h.0.weight')
    """
    first, *parts = name.split(".")
    if RECORDED not in first:
        parts = [first, *parts]
    return ".".join(part for part in parts if part != COMPILED)
