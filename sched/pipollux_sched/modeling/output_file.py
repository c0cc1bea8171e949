"""Writing a file so that whoever opens it meets the whole of it, or the one before."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .errors import ModelingError

FORMATS = ("png", "svg", "pdf")
"""Of pictures."""


def write_aside(path: Path, content: bytes) -> None:
    """Write a file beside its place and move it there once it is on the disk.

    Args:
        path: the file; its folder is made when missing, and it is replaced at one go.
        content: all of it.

    Raises:
        OSError: it cannot be written; what stood there before still does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(None, "it is a folder", str(path))
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, 0o644)
            file.write(content)
            file.flush()
            os.fsync(handle)
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def picture_format(path: Path) -> str:
    """Return the format that a picture's name asks for, one of `FORMATS`.

    Raises:
        ModelingError: it is none of them.
    """
    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise ModelingError(
            f"'{path}' does not say what kind of picture it is; let its name end in "
            + ", ".join(f".{name}" for name in FORMATS)
        )
    return suffix
