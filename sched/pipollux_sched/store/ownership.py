"""Private files: only the owner may access the state directory, lock and tokens.

Open permissions are restricted, with a warning; a file of another user is refused.
"""

from __future__ import annotations

import logging
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from .errors import StateDirError

_LOG = logging.getLogger(__name__)
_OTHERS = 0o077
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def make_private(path: Path, advice: str) -> bool:
    """Restrict a file or folder to its owner; return whether others had access before.

    `StateDirError`: it belongs to another user, is a link, or cannot be changed.
    """
    status = path.lstat()
    if status.st_uid != os.geteuid():
        raise StateDirError(f"{path} belongs to {_name(status.st_uid)}, not to you; {advice}")
    if stat.S_ISLNK(status.st_mode):
        raise StateDirError(f"{path} is a symbolic link; {advice}")
    mode = stat.S_IMODE(status.st_mode)
    if not mode & _OTHERS:
        return False
    try:
        path.chmod(mode & ~_OTHERS)
    except OSError as error:
        raise StateDirError(
            f"{path} is open to others (mode {mode:04o}) and cannot be tightened "
            f"({error.strerror}); {advice}"
        ) from error
    _LOG.warning("%s was open to others (mode %04o); it is yours alone now", path, mode)
    return True


def open_private(path: Path) -> TextIO:
    """Open a lock file for appending, as `make_private`; create it if missing."""
    with suppress(FileNotFoundError):
        make_private(path, "remove it where no scheduler runs")
    return os.fdopen(os.open(path, _FLAGS, 0o600), "a")


def _name(user: int) -> str:
    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"
