"""Logs of a job's replicas, a part at a time."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pipollux_sched.store import StateDir

from .models import LogTail

OFFSET_HEADER = "Pipollux-Log-Offset"
"""Header of an answer that is a part of a log: where to read on."""
MOST_BYTES = 2**20
"""Bytes of a log that are read at once."""


class LogPart(NamedTuple):
    """A part of a log."""

    content: bytes
    offset: int
    """Where to read on."""


def list_logs(state_dir: StateDir, job: str) -> list[LogTail]:
    """Return the logs that a job has, without their lines."""
    return [
        LogTail(generation=generation, replica=replica, lines=[])
        for generation, replica, _path in state_dir.logs(job)
    ]


def read_log(state_dir: StateDir, job: str, generation: int, replica: int, offset: int) -> LogPart:
    """Return a log from an offset on: at most `MOST_BYTES`, nothing if nothing is new.

    A log that was rotated since then is first read to its end in the rotated file, and then from
    the beginning of the new one; the offset after that end is 0.
    """
    path = state_dir.log(job, generation, replica)
    if _size(path) >= offset:
        return _read(path, offset)
    part = _read(path.with_name(path.name + ".1"), offset)
    if not part.content:
        return _read(path, 0)
    return LogPart(part.content, part.offset if len(part.content) == MOST_BYTES else 0)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _read(path: Path, offset: int) -> LogPart:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read(MOST_BYTES)
    except FileNotFoundError:  # it is being rotated
        return LogPart(b"", offset)
    return LogPart(content, offset + len(content))
