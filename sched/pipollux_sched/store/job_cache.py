"""A cache of frequently read jobs, as of the last commit.

Every request of a replica reads its job: the token, the attempt, the number of replicas. A record
is replaced when the transaction that changed it was committed, before the writer continues, so the
cache never returns an older record than the database would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from .records import JobRecord

__all__ = ["JobCache"]


class JobCache:
    """The records of unfinished jobs, as changed through one store object; thread-safe."""

    def __init__(self, read: Callable[[str], JobRecord]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._known: dict[str, JobRecord] = {}
        self._being_read: dict[str, object] = {}
        """By job, the last reader, unless the job has changed since."""

    def get(self, name: str) -> JobRecord | None:
        """Return a job without reading the database; None: not cached, use `find`."""
        return self._known.get(name)

    def find(self, name: str) -> JobRecord:
        """Return a job, or raise `UnknownJobError`."""
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
                # It may have changed since it was read.
                if self._being_read.get(name) is me:
                    del self._being_read[name]
                    if job is not None and not job.phase.ended:
                        self._known[name] = job
        return job

    def keep(self, changed: Mapping[str, JobRecord | None]) -> None:
        """Update the cache after each commit, in their order; None for a job to read again."""
        with self._lock:
            for name, job in changed.items():
                self._being_read.pop(name, None)
                if job is None or job.phase.ended:
                    self._known.pop(name, None)
                else:  # its replicas will need it
                    self._known[name] = job
