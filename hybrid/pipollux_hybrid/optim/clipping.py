"""Clips gradients by their norm over all stages, in single- and multi-process pipelines."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipollux_hybrid.job.mesh import ProcessMesh
from pipollux_hybrid.sync.tied_copies import TiedCopies, counted

__all__ = ["clip_over_stages"]


def clip_over_stages(
    mesh: ProcessMesh | None,
    tied: TiedCopies | None,
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    """Scale the gradients of this process so that the norm over all stages is at most ``max_norm``.

    Without a mesh these are all parameters; copies in other stages (``tied``) count once. The other
    arguments are those of :func:`torch.nn.utils.clip_grad_norm_`. Returns the norm before clipping,
    a scalar tensor, float64 in a process without gradients; raises a RuntimeError if it is not
    finite and ``error_if_nonfinite`` is set.
    """
    if mesh is None:
        return nn.utils.clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach
        )
    # Detached, as norm_guard refuses the gradients themselves.
    gradients = [p.grad.detach() for p in counted(tied, parameters) if p.grad is not None]
    mine = nn.utils.get_total_norm(gradients, norm_type, foreach=foreach)
    call = "model.clip_grad_norm_(…)"
    if math.isinf(norm_type):
        norm = max(mesh.calls.meet(call, number=float(mine)))
    else:
        norm = sum(mesh.calls.meet(call, number=float(mine) ** norm_type)) ** (1.0 / norm_type)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients of all stages is {norm}, so "
            "they cannot be clipped: omit error_if_nonfinite to continue with such gradients"
        )
    copies = [] if tied is None else tied.copies(parameters)
    for copy in copies:
        nn.utils.clip_grads_with_norm_(copy, max_norm, _norm_for(copy, norm), foreach)
    apart = set(copies)
    others = [p for p in parameters if p not in apart] if apart else parameters
    if gradients:
        total = mine.new_tensor(norm)
    elif copies:
        total = _norm_for(copies[0], norm)
    else:  # this stage has no gradients, so their type is unknown here: keep every digit
        total = torch.tensor(norm, dtype=torch.float64)
    nn.utils.clip_grads_with_norm_(others, max_norm, total, foreach)
    return total


def _norm_for(copy: nn.Parameter, norm: float) -> Tensor:
    """Return a norm in a type that depends on the copy alone, so that all copies stay equal."""
    dtype = torch.promote_types(copy.dtype, torch.float32).to_real()
    return torch.tensor(norm, dtype=dtype, device=copy.device)
