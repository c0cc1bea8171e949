"""Averages of the parameters stand still on accumulation steps, as the optimizer does.

A loop body that ends with ``average.update_parameters(module)`` would otherwise average parameters
that have not changed, once for each accumulation step, and forget the earlier ones too soon.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.optim.swa_utils import AveragedModel

__all__ = ["follow_steps"]

UPDATES = "update_parameters"


def follow_steps(module: nn.Module, is_accumulating: Callable[[], bool]) -> Callable[[], None]:
    """Have averages of a module's parameters follow optimizer steps only, from here on.

    Args:
        module: What is averaged.
        is_accumulating: Whether the optimizer's step does nothing now.

    Returns:
        A function that has them follow every call again.
    """
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
