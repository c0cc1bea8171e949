"""A lock that shows whether a replica of a job was ever started twice."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO


def hold_alone(folder: Path, rank: int, attempt: int) -> IO[str] | None:
    """Lock a replica's file in the job's folder for the life of this process; return it, to keep
    open.

    None if another process holds it, which is then recorded in the file `violations`.
    """
    file = (folder / f"replica-{rank}.lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        with (folder / "violations").open("a") as violations:
            violations.write(f"attempt {attempt}, replica {rank}: another one runs\n")
        return None
    return file
