"""Deletion of jobs that have ended: their records in the store, and their files.

The deletion is recorded first: from then on the job is gone, and its name is free again once all of
it is deleted. If the scheduler is killed meanwhile, the next one completes the deletion.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipollux_sched.store import JobRecord, StateDir, Store

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeletedJob:
    """A job that was deleted."""

    job: JobRecord
    left: tuple[Path, ...]
    """Folders that remain: the user's own `checkpoint_dir`, and those that cannot be removed."""


class JobDeletion:
    """Deletes jobs; `settle` is called before their events go."""

    def __init__(
        self, store: Store, state_dir: StateDir, settle: Callable[[], None] = lambda: None
    ) -> None:
        self._store, self._settle = store, settle
        self._state_dir = state_dir
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def delete(self, name: str) -> DeletedJob:
        """Delete a job, except its own `checkpoint_dir`; `JobUnfinishedError`: it has not ended."""
        self._settle()
        job = self._store.deletions.begin(name)
        self.finish()
        folders = [self._state_dir.job(name)]
        own = job.spec.get("checkpoint_dir")
        if own:
            folders.append(Path(own))
        return DeletedJob(job, tuple(folder for folder in folders if folder.exists()))

    def finish(self) -> None:
        """Complete all pending deletions; log once if files cannot be removed. Idempotent."""
        with self._lock:
            for pending in self._store.deletions.pending():
                try:
                    _remove(self._state_dir.job(pending.name))
                except OSError as error:
                    if pending.name not in self._told:
                        self._told.add(pending.name)
                        _LOG.warning(
                            "files of the deleted job %s are left: %s", pending.name, error
                        )
                else:
                    self._store.deletions.finish(pending)
                    self._told.discard(pending.name)


def _remove(folder: Path) -> None:
    if folder.is_symlink():  # the target of a link is not the scheduler's
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
