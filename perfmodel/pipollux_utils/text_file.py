"""Reading of text files, with clear errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def read_text_file(path: Path, refuse: Callable[[str], Exception]) -> str:
    """Return the text of a file, without a byte order mark. If it is missing, unreadable or not
    UTF-8, raises the error that `refuse` makes from a sentence.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise refuse(f"{path}: there is no such file{where}; check the path") from None
    except UnicodeDecodeError as error:
        raise refuse(not_text(str(path), error)) from None
    except OSError as error:
        raise refuse(f"{path}: cannot be read: {error.strerror}") from None


def not_text(name: str, error: UnicodeDecodeError) -> str:
    """Return the sentence that refuses bytes that are not UTF-8."""
    return f"{name}: not a text file: byte {error.start} is not UTF-8; save it as UTF-8"
