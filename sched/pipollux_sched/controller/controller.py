"""The controller: all components that act on the jobs of one scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from pipollux_sched.allocator.job_infos import node_info
from pipollux_sched.backend import ReplicaGroupManager
from pipollux_sched.store import StateDir, Store
from pipollux_sched.utils.vital_thread import VitalThreads

from .admission import program
from .commands import JobService
from .deletion import JobDeletion
from .executor import Executor
from .job_actions import StoredJobs
from .node_watch import NodeWatch
from .takeover import take_over
from .teams_file import TeamsFile
from .watchdog import HEARTBEAT_TIMEOUT, Watchdog


class Controller:
    """Carries out commands of users and decisions of the allocator on a backend.

    Args:
        environment: variables of every job; additions apply to later attempts.
        plan_settings: further data of the event that lists the nodes: policy, interval,
            restart_seconds.
        grace: seconds that a job has to save after a stop request.
        stopping: returns whether the scheduler is stopping, so that no job may be submitted.
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
    ) -> None:
        self._store, self._backend = store, backend
        self._grace, self._heartbeat_timeout = grace, heartbeat_timeout
        self.executor = Executor(
            store, backend, lambda job: program(job, environment), grace=grace, on_ended=reconsider
        )
        self._deletion = JobDeletion(store, state_dir)
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
        )
        self._teams = None if teams is None else TeamsFile(teams, store, reconsider)
        self._node_watch = NodeWatch(
            store, backend, self.executor.handle, settings=plan_settings, reconsider=reconsider
        )

    @property
    def lost(self) -> str | None:
        """Why nothing can ever be started again, in one sentence; None: it can."""
        return self._backend.lost

    def take_over(self, url: str) -> None:
        """Adopt what an earlier scheduler left running, or end it: see `takeover.take_over`."""
        self._node_watch.look()
        take_over(self._store, self._backend, self.executor, url, self._grace)
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
