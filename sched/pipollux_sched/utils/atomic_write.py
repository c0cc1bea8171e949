"""Atomic writes: readers see the whole new file, or the previous one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

PUBLIC, PRIVATE = 0o644, 0o600


def write_aside(path: Path, content: bytes, mode: int = PUBLIC) -> None:
    """Write a temporary file, and move it into place once it is on the disk.

    Args:
        path: the file, replaced atomically; its folder is created if missing.
        content: the whole content.
        mode: permission bits.

    Raises:
        OSError: it cannot be written; the previous file is kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(None, "it is a folder", str(path))
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, mode)
            file.write(content)
            file.flush()
            os.fsync(handle)
        Path(aside).replace(path)
    except BaseException:  # also on Ctrl-C, nothing is left behind
        Path(aside).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too
    finally:
        os.close(folder)
