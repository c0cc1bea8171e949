"""Warnings that name the line of the script that they are about."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import torch

_LIBRARIES = tuple(str(Path(path).parent) + "/" for path in (__file__, torch.__file__))


def warn(message: str) -> None:
    """Warn about the innermost line that is neither in this package nor in torch."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
