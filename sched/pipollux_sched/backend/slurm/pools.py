"""The allocations that replicas run in: the scheduler's own, or rented ones."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping

from .commands import SlurmError
from .output import SlurmJob
from .snapshot import SlurmSnapshot

LEAVE_BEFORE = 300.0
"""Seconds before the time limit of the scheduler's own allocation at which jobs save and end."""
LARGEST_SHARE = 0.25
"""Largest share of its time limit for which an allocation drains."""
REASON_PATIENCE = 10.0
"""Seconds to wait for the reason why the own allocation has ended."""
UNLISTED = 2
"""Consecutive snapshots without an allocation after which it counts as ended."""
_HELD = frozenset(
    ("RUNNING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")
)
"""States of an allocation that runs or will continue."""


class Pools(ABC):
    """Selects and manages the allocations of this scheduler."""

    @abstractmethod
    def choose(self, jobs: Mapping[int, SlurmJob]) -> Iterable[int]:
        """Return which of this user's jobs are allocations for replicas."""

    def look(self, snapshot: SlurmSnapshot) -> None:  # noqa: B027  # optional
        """Update the allocations; called with every snapshot, in its thread."""

    @property
    def lost(self) -> str | None:
        """Why there can be no allocation any more, in one sentence; None: there can."""
        return None

    def leaving(self, snapshot: SlurmSnapshot) -> Mapping[str, str]:
        """Return the nodes that will soon be released, and why, in one sentence."""
        del snapshot
        return {}

    def give_back(self, busy: Collection[int]) -> None:  # noqa: B027  # optional
        """Release drained allocations, except `busy` ones, which have replicas."""

    def replace(self, stuck: Mapping[int, str]) -> None:  # noqa: B027  # optional
        """Replace all allocations with a step that Slurm cannot end; `stuck` has the reasons."""

    def settle(self) -> None:  # noqa: B027  # optional
        """Wait a few seconds until `lost` has the reason, while snapshots are taken."""

    def close(self, busy: Collection[int]) -> None:  # noqa: B027  # optional
        """Release all allocations except `busy` ones, which have replicas."""


class OwnAllocation(Pools):
    """The allocation that the scheduler was started in; its nodes are the cluster.

    Shortly before its time limit all nodes drain, so that jobs save before Slurm ends them.

    Args:
        job: the allocation, from SLURM_JOB_ID.
        leave_before: seconds before the time limit; at most a quarter of the limit.
    """

    def __init__(self, job: int, leave_before: float = LEAVE_BEFORE) -> None:
        self._job = job
        self._leave_before = leave_before
        self._unlisted = 0
        """Consecutive snapshots that do not list it."""
        self._lost: str | None = None
        self._has_reason = threading.Event()

    def choose(self, jobs: Mapping[int, SlurmJob]) -> Iterable[int]:
        """Return this allocation only."""
        del jobs
        return (self._job,)

    def look(self, snapshot: SlurmSnapshot) -> None:
        """Record the end of the allocation.

        `SlurmError` at the start: it does not run, or belongs to another user.
        """
        if snapshot.number == 1 and self._job not in snapshot.allocations:
            raise SlurmError(
                f"Slurm has no running allocation {self._job} of yours: start the scheduler inside "
                "one, or let it request nodes with --nodes"
            )
        # The reason of its end is known only after everything in it has ended.
        self._lost = self._why_lost(snapshot.jobs.get(self._job)) or self._lost

    @property
    def lost(self) -> str | None:
        """Why it is gone: cancelled, past its time limit, or requeued, which starts it again."""
        return self._lost

    def settle(self) -> None:
        """Wait for the reason of the end, which Slurm has once it has ended every step."""
        if self._lost is not None:
            self._has_reason.wait(REASON_PATIENCE)

    def _why_lost(self, job: SlurmJob | None) -> str | None:
        self._unlisted = 0 if job is not None else self._unlisted + 1
        ended = self._unlisted >= UNLISTED if job is None else job.state not in _HELD
        if not ended:
            return None
        if job is None or job.state == "COMPLETING":
            state = ""
        else:
            self._has_reason.set()
            state = f" ({job.state}, {job.reason})" if job.reason else f" ({job.state})"
        return f"Slurm's allocation {self._job}, whose nodes were the cluster, has ended{state}"

    def leaving(self, snapshot: SlurmSnapshot) -> Mapping[str, str]:
        """Return all nodes when the time limit is near."""
        allocation = snapshot.allocations.get(self._job)
        if allocation is None or not ends_within(allocation.job, self._leave_before):
            return {}
        return dict.fromkeys(allocation.shares, ends_in(allocation.job))


def own_allocation(environment: Mapping[str, str]) -> OwnAllocation:
    """Return the allocation of this process; raise `SlurmError` if it is in none."""
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        raise SlurmError(
            "the scheduler is not in an allocation of Slurm's (SLURM_JOB_ID is not set): start it "
            "inside one, as with `salloc -N2 --exclusive --no-kill`, or let it request nodes with "
            "--nodes"
        )
    return OwnAllocation(int(job))


def ends_within(job: SlurmJob, seconds: float, factor: float = 1.0) -> bool:
    """Return whether an allocation ends within `factor` times the `seconds`.

    At most a quarter of its time limit counts as these `seconds`.
    """
    if job.seconds_left is None:
        return False
    limit = float("inf") if job.limit is None else job.limit
    return job.seconds_left < factor * min(seconds, LARGEST_SHARE * limit)


def ends_in(job: SlurmJob) -> str:
    """Return when an allocation ends, in one sentence."""
    return f"its allocation {job.job} ends in {(job.seconds_left or 0.0) / 60:.0f} min."
