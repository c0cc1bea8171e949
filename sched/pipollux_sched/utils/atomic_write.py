"""Write a file so that readers meet the whole of it, or the one before."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

PUBLIC, PRIVATE = 0o644, 0o600


def write_aside(path: Path, content: bytes, mode: int = PUBLIC) -> None:
    """Write a file beside its place and move it there once it is on the disk.

    Args:
        path: the file; its folder is made when missing, and it is replaced at one go.
        content: all of it.
        mode: who may read it.

    Raises:
        OSError: it cannot be written; what stood there before still does.
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
    except BaseException:  # Ctrl-C, too, leaves nothing behind
        Path(aside).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too
    finally:
        os.close(folder)
