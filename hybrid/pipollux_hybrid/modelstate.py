"""Model and optimizer in a checkpoint, keyed by layer.

Names are those of the user's own ``nn.Sequential``, never of stages, so that the next run may cut
the layers differently; nor do they tell whether a layer went through ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from .checkpoint import State
from .context import context
from .errors import CheckpointError
from .hostcopy import HostCopy
from .parameter_watch import foreign_parameter
from .safeload import check_loadable

__all__ = ["ModelState", "plain_name"]

STATE_NAME = "model.pt"
COMPILED = "_orig_mod"
"""What ``torch.compile`` puts into the names of a layer's parameters."""
REMEDY = "build the model the checkpoint was made with, or start with an empty directory"


class ModelState(State):
    """Parameters, buffers, optimizer state and learning-rate scheduler.

    Args:
        module: The plain module.
        optimizer: Its optimizer.
        lr_scheduler: The optimizer's scheduler, if any.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    ) -> None:
        super().__init__(STATE_NAME)
        self._module = module
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        self._host_copy = HostCopy()
        if context().env.checkpoint_dir is not None:  # better now than at the first save
            check_loadable("lr_scheduler", lr_scheduler.state_dict() if lr_scheduler else None)
            check_loadable("optimizer", optimizer.state_dict())

    def save(self, fileobj: BinaryIO) -> None:
        """Write everything with ``torch.save``."""
        torch.save(self._content(), fileobj)

    def snapshot(self) -> Callable[[BinaryIO], None]:
        """Copy the tensors to the host's memory; what is not a tensor is small and copied, too."""
        copy = self._host_copy.take(self._content())

        def write(fileobj: BinaryIO) -> None:
            self._host_copy.wait()
            torch.save(copy, fileobj)

        return write

    def load(self, fileobj: BinaryIO) -> None:
        """Read what :meth:`save` wrote; tensors go to where the parameters are.

        Raises:
            CheckpointError: It is of another model or optimizer; the first difference is named.
        """
        content = torch.load(fileobj, map_location="cpu", weights_only=True)
        self._load_model(content["model"])
        self._load_optimizer_state(content["optimizer"])
        if self._lr_scheduler is not None and content["lr_scheduler"] is not None:
            self._lr_scheduler.load_state_dict(content["lr_scheduler"])

    def _content(self) -> dict[str, Any]:
        schedule = self._lr_scheduler.state_dict() if self._lr_scheduler else None
        return {
            "model": {plain_name(n): x for n, x in self._module.state_dict().items()},
            "optimizer": self._named_optimizer_state(),
            "lr_scheduler": schedule,
        }

    def _load_model(self, saved: Mapping[str, Any]) -> None:
        ours = {plain_name(name): (name, x) for name, x in self._module.state_dict().items()}
        saved = {plain_name(name): x for name, x in saved.items()}
        difference = _difference(saved, {name: x for name, (_, x) in ours.items()})
        if difference is not None:
            raise CheckpointError(f"it is of another model: {difference}; {REMEDY}")
        self._module.load_state_dict({name: saved[plain] for plain, (name, _) in ours.items()})

    def _names(self) -> list[list[str]]:
        """Names of the parameters of each parameter group."""
        names = {parameter: plain_name(n) for n, parameter in self._module.named_parameters()}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in names:  # came since the last step, which would have refused it
                    raise foreign_parameter(parameter)
        return [[names[p] for p in group["params"]] for group in self._optimizer.param_groups]

    def _named_optimizer_state(self) -> dict[str, Any]:
        packed = self._optimizer.state_dict()
        groups = self._names()
        flat = [name for group in groups for name in group]
        return {
            "class": type(self._optimizer).__name__,
            "state": {flat[i]: state for i, state in packed["state"].items()},
            "groups": [
                {**group, "params": names}
                for group, names in zip(packed["param_groups"], groups, strict=True)
            ],
        }

    def _load_optimizer_state(self, content: dict[str, Any]) -> None:
        groups = self._names()
        self._check_optimizer(content, groups)
        flat = [name for group in groups for name in group]
        packed_groups, first = [], 0
        for group, names in zip(content["groups"], groups, strict=True):
            packed_groups.append({**group, "params": list(range(first, first + len(names)))})
            first += len(names)
        state = {i: content["state"][n] for i, n in enumerate(flat) if n in content["state"]}
        self._optimizer.load_state_dict({"state": state, "param_groups": packed_groups})

    def _check_optimizer(self, content: dict[str, Any], groups: list[list[str]]) -> None:
        ours = type(self._optimizer).__name__
        theirs = content.get("class", ours)
        if theirs != ours:
            raise CheckpointError(
                f"its optimizer is {theirs} and the script's is {ours}: use {theirs}, or start "
                "with an empty directory"
            )
        saved = [[plain_name(name) for name in group["params"]] for group in content["groups"]]
        if len(saved) != len(groups):
            raise CheckpointError(
                f"its optimizer has {len(saved)} parameter groups and the script's has "
                f"{len(groups)}: build the same groups, or start with an empty directory"
            )
        for index, (theirs_group, ours_group) in enumerate(zip(saved, groups, strict=True)):
            moved = sorted(set(theirs_group) ^ set(ours_group))
            if moved:
                raise CheckpointError(
                    f"group {index} of its optimizer has other parameters than the script's, the "
                    f"first being {moved[0]!r}: build the same groups, or start with an empty "
                    "directory"
                )


def plain_name(name: str) -> str:
    """The name of a parameter or buffer without the traces of ``torch.compile``.

    Example:
        >>> plain_name("0._orig_mod.weight")
        '0.weight'
    """
    return ".".join(part for part in name.split(".") if part != COMPILED)


def _difference(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """The first way in which a checkpoint's model differs from the script's, None if none."""
    for name, value in ours.items():
        if name not in saved:
            return f"{name!r} is missing in the checkpoint"
        shapes = [tuple(x.shape) for x in (saved[name], value) if isinstance(x, Tensor)]
        if len(shapes) == 2 and shapes[0] != shapes[1]:
            return f"{name!r} has shape {shapes[0]} in the checkpoint and {shapes[1]} in the script"
    extra = next((name for name in saved if name not in ours), None)
    return None if extra is None else f"{extra!r} of the checkpoint is not in the script's model"
