"""Refuses torch's norms of gradients in a multi-process pipeline.

``torch.nn.utils.clip_grad_norm_(model.parameters(), …)`` would take the norm of one stage for that
of the model, and each stage would scale its gradients by another factor. Scripts may have imported
the function under any name, so the check patches the helper that it and ``get_total_norm`` call
with the gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad

from pipollux_hybrid.errors import ConfigurationError

SORTS = "_group_tensors_by_device_and_dtype"
"""Name of torch's helper that receives the gradients before their norm is computed."""
NORM = "_get_total_norm"


def refuse_stage_norms(module: nn.Module) -> Callable[[], None]:
    """Refuse norms of a module's gradients from here on; return a function that undoes this."""
    original = getattr(clip_grad, SORTS)

    def sort(tensors: list[list[Tensor]], *args: Any) -> Any:
        if sys._getframe(1).f_code.co_name == NORM:
            gradients = {id(p.grad) for p in module.parameters() if p.grad is not None}
            if any(id(tensor) in gradients for tensor in tensors[0]):
                raise ConfigurationError(
                    "torch.nn.utils.clip_grad_norm_ or get_total_norm was called with gradients of "
                    "a multi-process pipeline, where each process only has those of its stage: "
                    "write model.clip_grad_norm_(max_norm), which takes the norm over all "
                    "stages and returns it; torch.nn.utils.clip_grad_value_ needs no norm"
                )
        # A stage may have no parameters, which torch does not expect.
        return original(tensors, *args) if tensors[0] else {}

    def allow() -> None:
        setattr(clip_grad, SORTS, original)

    setattr(clip_grad, SORTS, sort)
    return allow
