"""Model and optimizer in a checkpoint, keyed by layer.

Names are those of the user's own ``nn.Sequential``, never of stages, so that the next run may cut
the layers differently.
"""

from __future__ import annotations

from typing import Any, BinaryIO

import torch
from torch import nn

from .checkpoint import State
from .errors import CheckpointError

__all__ = ["ModelState"]


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
        super().__init__("model.pt")
        self._module = module
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler

    def save(self, fileobj: BinaryIO) -> None:
        """Write everything with ``torch.save``."""
        content = {
            "model": self._module.state_dict(),
            "optimizer": self._named_optimizer_state(),
            "lr_scheduler": self._lr_scheduler.state_dict() if self._lr_scheduler else None,
        }
        torch.save(content, fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        """Read what :meth:`save` wrote; tensors go to where the parameters are."""
        content = torch.load(fileobj, map_location="cpu", weights_only=True)
        self._module.load_state_dict(content["model"])
        self._load_optimizer_state(content["optimizer"])
        if self._lr_scheduler is not None and content["lr_scheduler"] is not None:
            self._lr_scheduler.load_state_dict(content["lr_scheduler"])

    def _names(self) -> list[list[str]]:
        """Names of the parameters of each parameter group."""
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        return [[names[p] for p in group["params"]] for group in self._optimizer.param_groups]

    def _named_optimizer_state(self) -> dict[str, Any]:
        packed = self._optimizer.state_dict()
        groups = self._names()
        flat = [name for group in groups for name in group]
        return {
            "state": {flat[i]: state for i, state in packed["state"].items()},
            "groups": [
                {**group, "params": names}
                for group, names in zip(packed["param_groups"], groups, strict=True)
            ],
        }

    def _load_optimizer_state(self, content: dict[str, Any]) -> None:
        groups = self._names()
        if [sorted(group["params"]) for group in content["groups"]] != [sorted(g) for g in groups]:
            raise CheckpointError(
                "the checkpoint's optimizer has other parameter groups than the script's: "
                "build the same model and optimizer, or start with an empty PIPOLLUX_CHECKPOINT_DIR"
            )
        flat = [name for group in groups for name in group]
        packed_groups, first = [], 0
        for group, names in zip(content["groups"], groups, strict=True):
            packed_groups.append({**group, "params": list(range(first, first + len(names)))})
            first += len(names)
        state = {i: content["state"][n] for i, n in enumerate(flat) if n in content["state"]}
        self._optimizer.load_state_dict({"state": state, "param_groups": packed_groups})
