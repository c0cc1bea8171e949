"""The job that a directory of checkpoints belongs to, so that no other job saves there.

Every process of a job holds a shared lock on the file ``.owner`` of the directory as long as it
lives; the kernel releases it however the process ends. A job that begins there asks for an
exclusive lock first, which it gets where no process of another job is left, and writes into the
file who it is. The locks are POSIX locks: they also work on NFS, and forked workers of a data
loader do not inherit them.

The job itself may begin again while a process of its last attempt is left, on a host that was cut
off, say: a scheduler has seen to it that it does not matter.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipollux_hybrid.job.env import JobEnvironment

__all__ = ["OWNER", "Owner"]

LOG = logging.getLogger(__name__)
OWNER = ".owner"
"""Name of the file."""
PATIENCE = 5.0
"""Seconds in which the last processes of a job that has just been stopped may end."""
POLL_INTERVAL = 0.1
_HELD = (errno.EACCES, errno.EAGAIN)
"""Errors of a lock that another process holds."""


class Owner:
    """One process's hold on a directory of checkpoints.

    Args:
        root: The directory, which exists.
        env: Who this process is.
    """

    def __init__(self, root: Path, env: JobEnvironment) -> None:
        self._root, self._env = root, env
        self._file: int | None = None

    def claim(self) -> str | None:
        """Make the directory this job's; the process that leads calls it.

        Returns:
            Why it cannot be, one sentence that names the job it belongs to; None: it is.
        """
        if not self._open():
            return None
        deadline = time.monotonic() + PATIENCE
        while not self._lock(fcntl.LOCK_EX):
            if self._was_ours():
                break
            if time.monotonic() > deadline:
                refusal = self._refusal()
                self.close()
                return refusal
            time.sleep(POLL_INTERVAL)
        self.record()
        self._lock(fcntl.LOCK_SH)
        return None

    def share(self) -> None:
        """Hold what another process of this job has claimed."""
        if self._open():
            self._lock(fcntl.LOCK_SH)

    def record(self) -> None:
        """Write down that this process leads the job; a full disk leaves the file as it is."""
        if self._file is None:
            return
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        content = {
            **_identity(self._env),
            "script": os.path.abspath(script) if script else None,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        with suppress(OSError):
            os.pwrite(self._file, json.dumps(content).encode().ljust(1024), 0)

    def close(self) -> None:
        """Let go of the directory."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _open(self) -> bool:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._file = self._file or os.open(self._root / OWNER, flags, 0o666)
        except OSError as error:  # that nothing can be written there is said by others
            LOG.debug("%s cannot be opened: %s", self._root / OWNER, error)
        return self._file is not None

    def _lock(self, kind: int) -> bool:
        """Return whether this process has the lock now, or the file system knows none."""
        assert self._file is not None  # noqa: S101  # the callers have opened it
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                return False
            if kind == fcntl.LOCK_EX:  # the first that is asked for, by one process
                LOG.warning(
                    "%s cannot be locked (%s): another job that saves there is not noticed",
                    *(self._root / OWNER, error.strerror),
                )
        return True

    def _holder(self) -> dict[str, Any]:
        assert self._file is not None  # noqa: S101  # the callers have opened it
        with suppress(OSError, ValueError):
            found = json.loads(os.pread(self._file, 1 << 16, 0))
            if isinstance(found, dict):
                return found
        return {}

    def _was_ours(self) -> bool:
        """Return whether it belongs to an earlier attempt of this very job."""
        mine, holder = _identity(self._env), self._holder()
        same = mine["job"] is not None and holder.get("job") == mine["job"]
        return same and holder.get("attempt") != mine["attempt"]

    def _refusal(self) -> str:
        holder = self._holder()
        names = [f"job {holder['job']}"] if holder.get("job") else []
        names += [str(holder["script"])] if holder.get("script") else []
        if holder.get("pid"):
            names.append(f"process {holder['pid']} on {holder.get('host')}")
        shown = f" ({', '.join(names)})" if names else ""
        return (
            f"PIPOLLUX_CHECKPOINT_DIR={self._root} belongs to another job that is running{shown}, "
            "and two jobs would mix their checkpoints: give each job a folder of its own, or stop "
            "that job first"
        )


def _identity(env: JobEnvironment) -> dict[str, str | None]:
    """Return which job this is to whoever starts it again, and which attempt; None: nobody does."""
    if env.attempt and env.job_id:
        return {"job": env.job_id, "attempt": str(env.attempt)}
    slurm = os.environ.get("SLURM_JOB_ID")
    if slurm:
        return {"job": f"{slurm} of Slurm", "attempt": os.environ.get("SLURM_RESTART_COUNT", "0")}
    return {"job": None, "attempt": None}
