"""Atomic writes: readers see the whole new file, or the previous one."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

PUBLIC, PRIVATE = 0o644, 0o600


def write_aside(path: Path, content: bytes, mode: int = PUBLIC) -> None:
    """Write a temporary file, flush it to disk, and rename it to `path`; its folder is created.
    Raises OSError if the file cannot be written; the previous file is kept.
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
    except BaseException:  # also on Ctrl-C: leave no temporary file
        Path(aside).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the rename durable
    finally:
        os.close(folder)


def write_output(path: Path, content: bytes) -> None:
    """Write a result to a path given by a user, like a shell redirection.

    A regular file is replaced atomically and keeps its permissions; a new file gets the permissions
    of the umask, its folder is created. A symbolic link stays, and its target is written. The
    content goes into devices, FIFOs and open files (`/dev/stdout`, `/dev/fd/3`) directly.

    Raises OSError if the file cannot be written; a regular file keeps its previous content.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        umask = os.umask(0o077)
        os.umask(umask)
        write_aside(Path(os.path.realpath(path)), content, 0o666 & ~umask)
        return
    opened = _descriptor(path)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(None, "it is a folder", str(path))
    if stat.S_ISREG(mode) and opened is None:
        write_aside(Path(os.path.realpath(path)), content, stat.S_IMODE(mode))
        return
    # A duplicate of an open descriptor keeps its position, and appends to the previous output.
    target = path if opened is None else os.dup(opened)
    with open(target, "wb", buffering=0) as file:
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]


def _descriptor(path: Path) -> int | None:
    own = {f"/proc/{process}/fd" for process in ("self", os.getpid())}
    while path.is_symlink():
        if os.path.realpath(path.parent) in own and path.name.isdecimal():
            return int(path.name)
        path = path.parent / path.readlink()
    return None
