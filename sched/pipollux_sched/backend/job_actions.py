"""The commands on jobs for an engine whose cluster has its own records of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import JobRecord


class JobActions(Protocol):
    """The commands of users on jobs; each method may raise `SchedulerError`."""

    def version(self) -> int:
        """Return a number that grows whenever a job has changed."""

    def jobs(self) -> Sequence[JobRecord]:
        """Return all jobs."""

    def steps(self) -> Mapping[str, int]:
        """Return the known optimizer steps of jobs so far."""

    def submit(self, spec: JobSpec) -> object:
        """Submit a job."""

    def suspend(self, name: str) -> object:
        """Suspend a job."""

    def resume(self, name: str) -> object:
        """Resume a job."""

    def cancel(self, name: str) -> object:
        """Cancel a job."""

    def delete(self, name: str) -> object:
        """Delete a job that has ended."""
