"""What a scheduler does with the jobs that an earlier one of the same store has left."""

from __future__ import annotations

import logging

from pipollux_sched.backend import Backend
from pipollux_sched.lifecycle import Adopt, NotAdopted, Recover
from pipollux_sched.store import JobRecord, Store

from .executor import Executor

__all__ = ["take_over"]

_LOG = logging.getLogger(__name__)


def take_over(store: Store, backend: Backend, executor: Executor, url: str, grace: float) -> None:
    """Adopt what an earlier scheduler left running, end the rest, and let its jobs go on.

    Args:
        store: what is known.
        backend: what runs.
        executor: lets events happen to jobs.
        url: where this scheduler answers.
        grace: seconds that what is ended has to save.

    Raises:
        BackendError: something is left and cannot be ended.
    """
    live = store.jobs(live=True)
    orphaned = [job.name for job in live if not _adopt(job, backend, executor, url)]
    for process in backend.recover(grace):
        _LOG.warning("ended what an earlier scheduler had left: %s", process)
    for name in orphaned:
        executor.handle(name, Recover())


def _adopt(job: JobRecord, backend: Backend, executor: Executor, url: str) -> bool:
    """Look after what runs of a job; say whether that can be.

    Where it cannot, the store knows before anything is ended: who takes over from a scheduler that
    is killed meanwhile must not take it for the job's own failure.
    """
    if not job.state.running_on:
        return False
    generation = job.state.generation
    refusal = backend.adopt(job.name, generation, url)
    found = Adopt(generation) if refusal is None else NotAdopted(generation, refusal)
    executor.handle(job.name, found)
    return refusal is None
