"""How many jobs were unfinished over the life of each: by what its equal share is reckoned."""

from __future__ import annotations

from collections.abc import Sequence

from pipollux_policies import Contention
from pipollux_sched.store import JobRecord, Store


def mean_jobs(store: Store, jobs: Sequence[JobRecord], now: float) -> dict[str, float]:
    """Return the number of unfinished jobs, averaged over each job's life so far.

    It follows from when jobs were submitted and ended, so that a scheduler which is started again
    goes on with it. Jobs that were deleted from the store no longer count.

    Args:
        store: knows the jobs that have ended.
        jobs: those that have not.
        now: seconds since the epoch.

    Returns:
        By job; one that was submitted at this moment is left out.
    """
    if not jobs:
        return {}
    lives = [(job.submitted_at, max(job.submitted_at, now)) for job in jobs]
    lives += store.overview.ended_since(min(begin for begin, _ in lives))
    return Contention(lives).means({job.name: job.submitted_at for job in jobs}, now)
