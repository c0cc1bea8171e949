"""The job that owns a directory of checkpoints, so that no other job saves there.

Every process of a job holds a shared lock on the file ``.owner`` of the directory while it lives;
the kernel releases it however the process ends. A job that begins there first requests an exclusive
lock, which it gets if no process of another job is left, and records its identity in the file. The
locks are POSIX locks: they also work on NFS, and forked workers of a data loader do not inherit
them.

The job itself may be restarted while a process of its last attempt is left, for example on a host
that was cut off: its scheduler has made sure that this process does no harm.
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
"""Name of the lock file."""
PATIENCE = 5.0
"""Seconds for the last processes of a stopped job to end."""
POLL_INTERVAL = 0.1
_HELD = (errno.EACCES, errno.EAGAIN)
"""Error numbers of a lock that another process holds."""


class Owner:
    """One process's lock on an existing directory of checkpoints."""

    def __init__(self, root: Path, env: JobEnvironment) -> None:
        self._root, self._env = root, env
        self._file: int | None = None

    def claim(self) -> str | None:
        """Make this job the owner of the directory; the leader calls it. Returns the reason for a
        refusal, one sentence that names the owner; None on success.
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
        """Lock the directory that another process of this job has claimed."""
        if self._open():
            self._lock(fcntl.LOCK_SH)

    def record(self) -> None:
        """Record this process as the leader of the job; a full disk leaves the file as it is."""
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
        """Release the lock."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _open(self) -> bool:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._file = self._file or os.open(self._root / OWNER, flags, 0o666)
        except OSError as error:  # prepare() reports a directory that is not writable
            LOG.debug("%s cannot be opened: %s", self._root / OWNER, error)
        return self._file is not None

    def _lock(self, kind: int) -> bool:
        """Return whether this process has the lock now, or the file system has no locks."""
        assert self._file is not None  # noqa: S101  # the callers have opened it
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                return False
            if kind == fcntl.LOCK_EX:  # warn once: only the leader requests it
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
        """Return whether the owner is an earlier attempt of this job."""
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
    """Return job and attempt as known to a scheduler or Slurm; None without them."""
    if env.attempt and env.job_id:
        return {"job": env.job_id, "attempt": str(env.attempt)}
    slurm = os.environ.get("SLURM_JOB_ID")
    if slurm:
        return {"job": f"{slurm} of Slurm", "attempt": os.environ.get("SLURM_RESTART_COUNT", "0")}
    return {"job": None, "attempt": None}
