"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path


def expanded(path: str | Path) -> Path:
    """Return a path with a home directory for its `~` or `~USER`.

    As in a shell, a path stays as it is if there is no such user.

    Example:
        >>> expanded("~no-such-user/train.py")
        PosixPath('~no-such-user/train.py')
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:  # pathlib's, of a user without a home directory
        return Path(path)
