"""The files of a replica's log: the current file, and renamed ones.

The offset of a byte is the number of bytes written before it to all files. A log that has grown too
large is renamed to `LOG.from-START`, where START is the offset of its first byte. Earlier files are
removed.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

__all__ = ["LogPart", "has_log", "read_part", "read_tail", "rename_full"]

_RENAMED = re.compile(r"\.from-(\d+)")


class LogPart(NamedTuple):
    """A part of a log."""

    content: bytes
    offset: int
    """The next offset."""


class _Piece(NamedTuple):
    start: int
    file: BinaryIO
    size: int


def read_part(path: Path, offset: int, most: int) -> LogPart:
    """Return the bytes after an offset, at most `most`; empty if there is no new output.

    If bytes after the offset were removed, the part begins with a line with their number.
    """
    with ExitStack() as resources:
        for piece in _pieces(path, resources):
            if piece.start > offset:
                lost = _describe_lost(piece.start - offset)
                content = _read(piece, 0, most)
                return LogPart(lost + content, piece.start + len(content))
            if offset < piece.start + piece.size:
                content = _read(piece, offset - piece.start, most)
                return LogPart(content, offset + len(content))
    return LogPart(b"", offset)


def read_tail(path: Path, most: int) -> bytes:
    """Return the last bytes of a log; empty if there is no log."""
    with ExitStack() as resources:
        tail = b""
        for piece in reversed(_pieces(path, resources)):
            wanted = most - len(tail)
            tail = _read(piece, max(piece.size - wanted, 0), wanted) + tail
            if len(tail) >= most:
                break
        return tail


def has_log(path: Path) -> bool:
    """Return whether a log has any file, even while it is being renamed."""
    return path.exists() or bool(_renamed(path))


def rename_full(path: Path) -> None:
    """Rename a log that has grown too large, or raise OSError; remove files renamed earlier."""
    before = _renamed(path)
    start = max((begin + other.stat().st_size for begin, other in before.items()), default=0)
    path.replace(path.with_name(f"{path.name}.from-{start}"))
    for other in before.values():
        other.unlink(missing_ok=True)


def _pieces(path: Path, resources: ExitStack) -> list[_Piece]:
    """Open the files of a log, in the order of their offsets; closing `resources` closes them."""
    while True:
        names = _renamed(path)
        opened = ExitStack()
        found, end = [], 0
        for start, name in [*sorted(names.items()), (None, path)]:
            try:
                file = opened.enter_context(name.open("rb"))
            except OSError:  # removed, or about to be renamed
                continue
            size = os.fstat(file.fileno()).st_size
            found.append(_Piece(end if start is None else start, file, size))
            end = found[-1].start + size
        if _renamed(path) == names:
            resources.enter_context(opened)
            return found
        opened.close()


def _renamed(path: Path) -> dict[int, Path]:
    found = {}
    for other in path.parent.glob(f"{path.name}.from-*"):
        match = _RENAMED.fullmatch(other.name.removeprefix(path.name))
        if match:
            found[int(match[1])] = other
    return found


def _read(piece: _Piece, position: int, most: int) -> bytes:
    piece.file.seek(position)
    return piece.file.read(min(most, piece.size - position))


def _describe_lost(size: int) -> bytes:
    return (
        f"[pipollux: {size} bytes of output are missing here, "
        "as only the end of a long log is kept]\n"
    ).encode()
