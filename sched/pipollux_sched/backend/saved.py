"""The steps at which a job has saved, from its checkpoint folder.

The folder may belong to another user, and this process to root: only small regular files are read,
and no link below the folder is followed.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from pipollux_protocol.files import STOP_MARKER, StopMarker

from .base import Launch

__all__ = ["marked_step", "newest_checkpoint"]

_LIMIT = 2**24
"""Bytes of the largest file that is read."""


def marked_step(launch: Launch) -> int | None:
    """Return the step of an attempt's agreed stop, from the marker beside its checkpoint."""
    try:
        found = StopMarker.model_validate(_read(Path(launch.checkpoints, STOP_MARKER)))
    except (OSError, ValueError, RecursionError):
        return None
    return found.step if found.attempt == launch.attempt else None


def newest_checkpoint(launch: Launch) -> int | None:
    """Return the step of the newest checkpoint; None if there is none, or none is visible."""
    try:
        names = sorted(name for name in os.listdir(launch.checkpoints) if _is_checkpoint(name))
        return int(_read(Path(launch.checkpoints, names[-1]) / "metrics.json")["step"])
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None


def _is_checkpoint(name: str) -> bool:
    return name.removeprefix("checkpoint-").isdecimal()


def _read(path: Path) -> Any:
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # Do not block on a pipe.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(path.name, flags, dir_fd=folder), encoding="utf-8") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_size > _LIMIT:
                raise ValueError(f"{path} is not a small file")
            return json.load(file)
    finally:
        os.close(folder)
