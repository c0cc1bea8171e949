"""Refuses torch's norms of gradients where each process holds those of one stage.

``torch.nn.utils.clip_grad_norm_(model.parameters(), …)`` there takes the norm of one stage for that
of the model, and each stage scales its gradients by another factor. Scripts hold that function by
any name, so it is met where it and ``get_total_norm`` sort gradients before they take their norms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad

from pipollux_hybrid.errors import ConfigurationError

__all__ = ["refuse_stage_norms"]

SORTS = "_group_tensors_by_device_and_dtype"
"""What torch calls with the gradients, from the function that takes their norm."""
NORM = "_get_total_norm"


def refuse_stage_norms(module: nn.Module) -> Callable[[], None]:
    """Refuse norms of gradients of a module from here on.

    Args:
        module: With the layers of one stage.

    Returns:
        A function that allows them again.
    """
    original = getattr(clip_grad, SORTS)

    def sort(tensors: list[list[Tensor]], *args: Any) -> Any:
        if sys._getframe(1).f_code.co_name == NORM:
            gradients = {id(p.grad) for p in module.parameters() if p.grad is not None}
            if any(id(tensor) in gradients for tensor in tensors[0]):
                raise ConfigurationError(
                    "torch.nn.utils.clip_grad_norm_ or get_total_norm was called with gradients of "
                    "a model whose stages have processes, each with the gradients of its own stage "
                    "only: write model.clip_grad_norm_(max_norm), which takes the norm over all "
                    "stages and returns it; torch.nn.utils.clip_grad_value_ needs no norm"
                )
        # A stage may have no parameters, where torch does not expect that of a model.
        return original(tensors, *args) if tensors[0] else {}

    def allow() -> None:
        setattr(clip_grad, SORTS, original)

    setattr(clip_grad, SORTS, sort)
    return allow
