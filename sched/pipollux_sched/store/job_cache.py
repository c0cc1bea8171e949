"""Jobs that are asked for again and again, in memory, as of the last commit.

Every request of a job's replicas asks for its job: for its token, its attempt, its number of
replicas. A record is replaced when the transaction that changed it was committed, before whoever
changed it goes on, so nobody is given an older one than the database would have given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from .records import JobRecord

__all__ = ["JobCache"]


class JobCache:
    """The records of jobs that have not ended and were asked for, or have changed.

    Every method may be called from any thread. Only changes through the same store object are
    noticed: that of the one scheduler that writes.

    Args:
        read: returns the record of a job, or raises `UnknownJobError`.
    """

    def __init__(self, read: Callable[[str], JobRecord]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._known: dict[str, JobRecord] = {}
        self._being_read: dict[str, object] = {}
        """By job, who began to read it last, unless it has changed since."""

    def get(self, name: str) -> JobRecord | None:
        """Return a job without asking the database; None: it has to be asked, with `find`."""
        return self._known.get(name)

    def find(self, name: str) -> JobRecord:
        """Return a job.

        Raises:
            UnknownJobError: there is none of this name.
        """
        known = self._known.get(name)
        if known is not None:
            return known
        me = object()
        with self._lock:
            self._being_read[name] = me
        job: JobRecord | None = None
        try:
            job = self._read(name)
        finally:
            with self._lock:
                # It may have changed after it was read.
                if self._being_read.get(name) is me:
                    del self._being_read[name]
                    if job is not None and not job.phase.ended:
                        self._known[name] = job
        return job

    def keep(self, changed: Mapping[str, JobRecord | None]) -> None:
        """Note what jobs have become; called in the order of commits.

        Args:
            changed: by name; None for a job that is to be read again when it is asked for.
        """
        with self._lock:
            for name, job in changed.items():
                self._being_read.pop(name, None)
                if job is None or job.phase.ended:
                    self._known.pop(name, None)
                else:  # its replicas will ask
                    self._known[name] = job
