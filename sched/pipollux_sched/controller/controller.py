"""The controller: all components that act on the jobs of one scheduler."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from pipollux_sched.allocator.job_infos import node_info
from pipollux_sched.backend import ReplicaGroupManager
from pipollux_sched.lifecycle import Adopt, NotAdopted, Recover
from pipollux_sched.notifications.notifier import Notifier
from pipollux_sched.notifications.service import NotificationService
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import JobRecord, StateDir, Store, SweepSummary
from pipollux_sched.utils.vital_thread import VitalThreads

from .admission import program
from .commands import JobService
from .deletion import JobDeletion
from .executor import Executor
from .node_watch import NodeWatch
from .sweeps import SweepLoop
from .teams_file import TeamsFile
from .watchdog import HEARTBEAT_TIMEOUT, Watchdog

_LOG = logging.getLogger(__name__)


class Controller:
    """Carries out commands of users and decisions of the allocator on a backend.

    Args:
        environment: variables of every job; additions apply to later attempts.
        plan_settings: further data of the event that lists the nodes: policy, interval,
            restart_seconds.
        grace: seconds that a job has to save after a stop request.
        stopping: returns whether the scheduler is stopping, so that no job may be submitted.
        notifier: sends notifications, to `notify_hosts`.
    """

    def __init__(
        self,
        store: Store,
        backend: ReplicaGroupManager,
        state_dir: StateDir,
        *,
        environment: Mapping[str, str],
        plan_settings: Mapping[str, Any],
        grace: float,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        reconsider: Callable[[], None],
        stopping: Callable[[], bool],
        teams: Path | None = None,
        notifier: Notifier,
        notify_hosts: Sequence[str],
    ) -> None:
        self._store, self._backend = store, backend
        self._grace, self._heartbeat_timeout = grace, heartbeat_timeout
        self.executor = Executor(
            store, backend, lambda job: program(job, environment), grace=grace, on_ended=reconsider
        )
        self._deletion = JobDeletion(store, state_dir, notifier.collector.collect)
        self._deletion.finish()
        self.control = JobService(
            store,
            self.executor,
            backend,
            lambda: {name: node_info(node.spec) for name, node in backend.nodes().items()},
            reconsider=reconsider,
            stopping=stopping,
            state_dir=state_dir.path,
            deletion=self._deletion,
            notifications=NotificationService(
                store, notify_hosts, why_not=notifier.why_not, wake=notifier.wake
            ),
        )
        check = self.control.notifications.check_teams
        self._teams = None if teams is None else TeamsFile(teams, store, reconsider, check)
        self._node_watch = NodeWatch(
            store,
            backend,
            self.executor.handle,
            settings=plan_settings,
            reconsider=reconsider,
            listed=self.control.levels.update,
        )

    @property
    def lost(self) -> str | None:
        """Why nothing can ever be started again, in one sentence; None: it can."""
        return self._backend.lost

    def take_over(self, url: str) -> None:
        """Adopt what an earlier scheduler left running, or end it: see `take_over`."""
        self._node_watch.look()
        take_over(self._store, self._backend, self.executor, url, self._grace)
        self._node_watch.look()  # slots that are left out count while adopted jobs hold them
        self.control.expect_replicas()

    def start(self, threads: VitalThreads, resources: ExitStack, ending: threading.Event) -> None:
        """Start the threads that watch and act; closing `resources` ends them."""
        watchdog = Watchdog(
            self._store,
            self.control.heartbeats,
            self.executor.handle,
            ending=ending,
            look_at_nodes=self._look,
            tidy=self._deletion.finish,
            heartbeat_timeout=self._heartbeat_timeout,
        )
        threads.start(resources, "watchdog", watchdog.run, ending)
        threads.start(
            resources, "executor", partial(self.executor.run, ending), self.executor.woken
        )
        sweeps = SweepLoop(self._store, self.control.submit_trials, self.executor.handle)
        threads.start(resources, "sweeps", partial(sweeps.run, ending), ending)
        jobs = StoredJobs(self._store, self.control)
        keep = partial(self._backend.keep_records, jobs, ending)
        threads.start(resources, "records", keep, ending)

    def _look(self) -> None:
        self._node_watch.look()
        if self._teams is not None:
            self._teams.look()

    def end_processes(self) -> None:
        """End all processes at once, and store how they ended."""
        self._backend.shutdown()
        self.executor.step()


class StoredJobs:
    """The jobs of a store, and the commands on them."""

    def __init__(self, store: Store, control: JobService) -> None:
        self._store, self._control = store, control
        self._sweeps: dict[str, SweepSummary] = {}

    def version(self) -> int:
        """Return the version of the store."""
        return self._store.version

    def jobs(self) -> Sequence[JobRecord]:
        """Return all jobs, sweeps and trials included."""
        return self._store.jobs()

    def sweeps(self) -> Mapping[str, SweepSummary]:
        """Return the progress of all sweeps, by name."""
        counts = self._store.sweeps.counts()
        self._sweeps = {
            job.name: self._store.sweeps.summary(
                job, counts.get(job.name, {}), self._sweeps.get(job.name)
            )
            for job in self._store.sweeps.all()
        }
        return self._sweeps

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
    if refusal is not None:
        _LOG.warning("job %s cannot be adopted: %s", job.name, refusal)
    found = Adopt(attempt) if refusal is None else NotAdopted(attempt, refusal)
    executor.handle(job.name, found)
    return refusal is None
