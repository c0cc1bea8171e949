"""Whether what is about to be saved can be read back without running code from the file."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from .errors import CheckpointError

__all__ = ["check_loadable"]


def check_loadable(name: str, content: Any) -> None:
    """Refuse content that ``torch.load(..., weights_only=True)`` would not read.

    Better before training than at the first restart.

    Args:
        name: What the content is, for the message.
        content: What a ``state_dict()`` gave; it is written to memory and read back, without the
            elements of its tensors.

    Raises:
        CheckpointError: There is something other than tensors and plain Python in it.
    """
    copy = io.BytesIO()
    try:
        torch.save(_without_elements(content), copy)
        copy.seek(0)
        torch.load(copy, weights_only=True)
    except Exception as error:  # objects may do whatever they like when they are pickled
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(
            f"the state of {name} cannot be kept in a checkpoint: its state_dict() must hold "
            f"tensors, numbers, strings, lists and dicts only ({reason})"
        ) from error


def _without_elements(value: Any) -> Any:
    """The same nest with empty tensors: an average of a large model is not written twice."""
    if type(value) in (Tensor, nn.Parameter):
        return torch.empty(0, dtype=value.dtype)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _without_elements(x)) for key, x in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(_without_elements, value))
    return value
