"""Averages of parameters skip accumulation steps, as the optimizer does.

Else ``average.update_parameters(module)`` at the end of a loop body would average unchanged
parameters, and forget earlier ones too soon.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.optim.swa_utils import AveragedModel

__all__ = ["follow_steps"]

UPDATES = "update_parameters"


def follow_steps(module: nn.Module, is_accumulating: Callable[[], bool]) -> Callable[[], None]:
    """Update averages of a module after optimizer steps only; return a function to undo this."""
    original: Callable[[AveragedModel, nn.Module], None] = getattr(AveragedModel, UPDATES)

    def update_parameters(average: AveragedModel, model: nn.Module) -> None:
        if is_accumulating():
            own = {id(parameter) for parameter in module.parameters()}
            if any(id(parameter) in own for parameter in model.parameters()):
                return
        original(average, model)

    def forget() -> None:
        setattr(AveragedModel, UPDATES, original)

    setattr(AveragedModel, UPDATES, update_parameters)
    return forget
