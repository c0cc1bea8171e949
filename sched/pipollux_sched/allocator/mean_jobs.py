"""The number of unfinished jobs over the life of each job, which determines its equal share."""

from __future__ import annotations

from collections.abc import Sequence

from pipollux_policies import Contention
from pipollux_sched.store import JobRecord, Store


def mean_jobs(store: Store, jobs: Sequence[JobRecord], now: float) -> dict[str, float]:
    """Return the number of unfinished jobs, averaged over the life of each of `jobs` so far.

    It is computed from submission and end times, so it survives a restart of the scheduler. Deleted
    jobs do not count, and jobs that were submitted at this moment are left out.
    """
    if not jobs:
        return {}
    lives = [(job.submitted_at, max(job.submitted_at, now)) for job in jobs]
    lives += store.overview.ended_since(min(begin for begin, _ in lives))
    return Contention(lives).means({job.name: job.submitted_at for job in jobs}, now)
