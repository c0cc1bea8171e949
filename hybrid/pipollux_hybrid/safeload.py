"""Whether what is about to be saved can be read back without running code from the file."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from .errors import CheckpointError

__all__ = ["check_loadable"]


def check_loadable(name: str, content: Any) -> None:
    """Refuse content that ``torch.load(..., weights_only=True)`` would not read.

    Better at the first save than at the first restart.

    Args:
        name: What the content is, for the message.
        content: What a ``state_dict()`` gave; it is written to memory and read back.

    Raises:
        CheckpointError: There is something other than tensors and plain Python in it.
    """
    copy = io.BytesIO()
    try:
        torch.save(content, copy)
        copy.seek(0)
        torch.load(copy, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"the state of {name} cannot be kept in a checkpoint: its state_dict() must hold "
            f"tensors, numbers, strings, lists and dicts only ({reason})"
        ) from error
