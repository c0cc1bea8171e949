"""Atomic writes: readers see the whole new file, or the previous one."""

from __future__ import annotations

import os
import stat
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


def write_output(path: Path, content: bytes) -> None:
    """Write a result to a path that a user names, as a shell's redirection would.

    A regular file is replaced atomically and keeps its permissions; a new one has those that the
    umask leaves. A symbolic link stays, and its target is written. Devices, FIFOs and open files
    (`/dev/stdout`, `/dev/fd/3`) are written into.

    Args:
        path: the file; the folder of a new one is created if missing.
        content: the whole content.

    Raises:
        OSError: it cannot be written; the previous content of a regular file is kept.
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
    # A copy of an open file's descriptor goes on where the last output ended.
    target = path if opened is None else os.dup(opened)
    with open(target, "wb", buffering=0) as file:
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]


def _descriptor(path: Path) -> int | None:
    """Return the descriptor of this process that a path names, such as `/dev/stdout`."""
    own = {f"/proc/{process}/fd" for process in ("self", os.getpid())}
    while path.is_symlink():
        if os.path.realpath(path.parent) in own and path.name.isdecimal():
            return int(path.name)
        path = path.parent / path.readlink()
    return None
