"""What kinds of pictures can be written."""

from __future__ import annotations

from pathlib import Path

from .errors import ModelingError

FORMATS = ("png", "svg", "pdf")
"""Of pictures."""


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
