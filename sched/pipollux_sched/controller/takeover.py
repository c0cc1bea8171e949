"""Takeover of jobs from an earlier scheduler of the same store."""

from __future__ import annotations

import logging

from pipollux_sched.backend import ReplicaGroupManager
from pipollux_sched.lifecycle import Adopt, NotAdopted, Recover
from pipollux_sched.store import JobRecord, Store

from .executor import Executor

_LOG = logging.getLogger(__name__)


def take_over(
    store: Store, backend: ReplicaGroupManager, executor: Executor, url: str, grace: float
) -> None:
    """Adopt the attempts that an earlier scheduler left running; end and restart the rest.

    An ended attempt has `grace` seconds to checkpoint. `BackendError`: a process cannot be ended.
    """
    unfinished = store.jobs(unfinished=True)
    orphaned = [job for job in unfinished if not _adopt(job, backend, executor, url)]
    for process in backend.recover(grace):
        _LOG.warning("ended a process of an earlier scheduler: %s", process)
    for job in orphaned:
        step = backend.saved_step(job.name, job.state.attempt)
        newest = backend.newest_checkpoint(job.name, job.state.attempt) if step is None else None
        executor.handle(job.name, Recover(step, newest))


def _adopt(job: JobRecord, backend: ReplicaGroupManager, executor: Executor, url: str) -> bool:
    """Adopt the running attempt of a job; return whether that is possible.

    If not, the store records it before anything is ended: if this scheduler is killed, the next one
    must not count the end as a failure of the job.
    """
    if not job.state.running_on:
        return False
    attempt = job.state.attempt
    refusal = backend.adopt(job.name, attempt, url, job.state.membership)
    found = Adopt(attempt) if refusal is None else NotAdopted(attempt, refusal)
    executor.handle(job.name, found)
    return refusal is None
