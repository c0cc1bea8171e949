"""Logs of a job's replicas, in parts."""

from __future__ import annotations

from pipollux_sched.store import StateDir
from pipollux_sched.store.log_files import LogPart, read_part

from .models import LogTail

__all__ = ["MOST_BYTES", "OFFSET_HEADER", "LogPart", "list_logs", "read_log"]

OFFSET_HEADER = "Pipollux-Log-Offset"
"""Header of a part of a log: the next offset."""
MOST_BYTES = 2**20
"""Largest number of bytes per read."""


def list_logs(state_dir: StateDir, job: str) -> list[LogTail]:
    """Return the logs of a job, without their lines."""
    return [
        LogTail(attempt=attempt, replica=replica, lines=[])
        for attempt, replica, _path in state_dir.logs(job)
    ]


def read_log(state_dir: StateDir, job: str, attempt: int, replica: int, offset: int) -> LogPart:
    """Return at most `MOST_BYTES` of a log from an offset on; see `read_part`."""
    return read_part(state_dir.log(job, attempt, replica), offset, MOST_BYTES)
