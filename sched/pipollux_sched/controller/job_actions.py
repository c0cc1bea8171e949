"""The commands on jobs for engines: see `pipollux_sched.backend.job_actions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import JobRecord, Store

from .commands import JobService

__all__ = ["StoredJobs"]


class StoredJobs:
    """The jobs of a store, and the commands on them."""

    def __init__(self, store: Store, control: JobService) -> None:
        self._store, self._control = store, control

    def version(self) -> int:
        """Return the version of the store."""
        return self._store.version

    def jobs(self) -> Sequence[JobRecord]:
        """Return all jobs."""
        return self._store.jobs()

    def steps(self) -> Mapping[str, int]:
        """Return the step of each job's last report."""
        return {name: point.step for name, point in self._store.last_points().items()}

    def submit(self, spec: JobSpec) -> object:
        """Submit a job: see `JobService.submit`."""
        return self._control.submit(spec)

    def suspend(self, name: str) -> object:
        """Suspend a job: see `JobService.suspend`."""
        return self._control.suspend(name)

    def resume(self, name: str) -> object:
        """Resume a job: see `JobService.resume`."""
        return self._control.resume(name)

    def cancel(self, name: str) -> object:
        """Cancel a job: see `JobService.cancel`."""
        return self._control.cancel(name)

    def delete(self, name: str) -> object:
        """Delete a job: see `JobService.delete`."""
        return self._control.delete(name)
