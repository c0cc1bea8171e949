"""The scheduler as one object: store, controller, allocator, backend and server.

Eight threads share the work, and communicate only through the store:

* `pipollux-http` answers jobs and users (`pipollux_sched.server`);
* `pipollux-allocator` decides on allocations, which may take long (`.allocator`);
* `pipollux-executor` starts, stops and polls processes (`.controller`);
* `pipollux-watchdog` checks for overdue events, and prunes the store (`.controller`);
* `pipollux-records` keeps the cluster's own records of jobs in step (`.backend`);
* `pipollux-forecasts` has jobs forecast by a process of its own (`.forecasting`);
* `pipollux-notify` puts events into the outbox, and has them sent (`.notifications`);
* `pipollux-events` passes events on to listeners (`.store.event_feed`).

With autoscaling, `pipollux-expander` requests nodes. With GPUs on the local backend,
`pipollux-gpus` reads their state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Self

from pipollux_policies import (
    DEFAULT_POLICY,
    DEFAULT_RESTART_SECONDS,
    AutoscalingRules,
    NodePlan,
    Policy,
    make_policy,
)
from pipollux_protocol import environment as variables
from pipollux_sched.allocator.allocator import AllocationLoop, Allocator
from pipollux_sched.allocator.autoscaler import Autoscaler
from pipollux_sched.allocator.expander import Expander
from pipollux_sched.allocator.snapshot import SnapshotReader
from pipollux_sched.allocator.strategy import EvenStrategy, FixedStrategy, PolicyStrategy, Strategy
from pipollux_sched.backend.registry import DEFAULT_BACKEND, EngineOptions, make_engine
from pipollux_sched.controller.commands import JobService
from pipollux_sched.controller.controller import Controller
from pipollux_sched.controller.watchdog import HEARTBEAT_TIMEOUT
from pipollux_sched.forecasting.loop import SHARE, ForecastLoop
from pipollux_sched.forecasting.policy import can_simulate
from pipollux_sched.forecasting.process import ForecastProcess
from pipollux_sched.notifications.hosts import HostRules
from pipollux_sched.notifications.notifier import Notifier, NotifyOptions
from pipollux_sched.planning.explain import explanation
from pipollux_sched.server.address import ServerAddress
from pipollux_sched.server.http_server import HttpServer
from pipollux_sched.spec.cluster import ClusterSpec
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store.event_feed import EventFeed, Listener
from pipollux_sched.store.store import wait_until
from pipollux_sched.utils.vital_thread import VitalThreads
from pipollux_utils.units import check_seconds

from .backend import ReplicaGroupManager
from .lifecycle import Allocate
from .metrics import SchedulerMetrics
from .server import create_app, end_waiting
from .store import JobRecord, StateDir, Store

STOP_GRACE = 30.0
"""Seconds that a job has to save after a stop request."""


class Scheduler:
    """A scheduler for one cluster, with all state in one directory.

    Example:
        >>> with Scheduler(Path("state"), load_cluster("cluster.yaml")) as scheduler:
        ...     scheduler.submit(load_jobs("jobs.yaml")[0])
        ...     scheduler.wait(lambda jobs: all(job.phase.ended for job in jobs.values()))

    Args:
        state_dir: the state directory; created if missing.
        cluster: the nodes, or the path of their file; None: the engine finds them itself.
        policy: decides on allocations; None: the default one.
        interval: seconds between two decisions on all jobs.
        hints_interval: seconds between two fits, and hints, of a job.
        checkpoint_interval: seconds between two checkpoints of a job.
        restart_seconds: assumed cost of a restart until a job's own has been measured.
        grace: seconds that a job has to save after a stop request.
        heartbeat_timeout: seconds without a heartbeat after which a replica counts as lost.
        open_metrics: whether `/metrics` is available without a token.
        pass_environment: further variables of this process to pass to jobs.
        address: the address to listen on, and the URL for jobs and users.
        on_event: called with every event, in order, in a separate thread.
        event_types: only with events of these types; None: all.
        autoscaling: bounds on the number of nodes; requires `expander`.
        expander: receives requests for nodes.
        allocations: node of each replica by job (`Allocation` if K is not the job's own); replaces
            the policy, and each job runs only there.
        forecasts: largest share of one core for forecasts of starts and ends; 0: none are made,
            nor under a policy that is not in `POLICIES`.
        store: URL of the store's database, which is saved; None: the saved one, else SQLite.
        teams: the file of teams, reloaded when it changes; None: those in the store.
        notify: the hosts that notifications may be sent to, and the pace of attempts.
        backend: name of the engine that runs jobs: see `backend.registry`.
        backend_options: options of that engine alone.

    Raises:
        ValueError: a time is not between 0 and a week, `forecasts` not between 0 and 1, or an
            entry of `notify.hosts` is no host.
    """

    def __init__(
        self,
        state_dir: Path | StateDir,
        cluster: ClusterSpec | Path | None,
        policy: Policy | None = None,
        *,
        interval: float = 60.0,
        hints_interval: float = 30.0,
        checkpoint_interval: float = 60.0,
        restart_seconds: float = DEFAULT_RESTART_SECONDS,
        grace: float = STOP_GRACE,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        open_metrics: bool = False,
        pass_environment: Collection[str] = (),
        address: ServerAddress | None = None,
        on_event: Listener | None = None,
        event_types: Collection[str] | None = None,
        autoscaling: AutoscalingRules | None = None,
        expander: Expander | None = None,
        allocations: Mapping[str, Sequence[str]] | None = None,
        forecasts: float = SHARE,
        store: str | None = None,
        teams: Path | None = None,
        notify: NotifyOptions | None = None,
        backend: str = DEFAULT_BACKEND,
        backend_options: object = None,
    ) -> None:
        check_seconds(interval=interval, hints_interval=hints_interval)
        check_seconds(checkpoint_interval=checkpoint_interval, heartbeat_timeout=heartbeat_timeout)
        if not 0 <= forecasts <= 1:
            raise ValueError(f"forecasts: {forecasts} must be between 0 and 1")
        self._forecasts = forecasts
        self.state_dir = state_dir if isinstance(state_dir, StateDir) else StateDir(state_dir)
        self._store_url, self._cluster, self._teams = store, cluster, teams
        self._notify = notify or NotifyOptions()
        HostRules.parse(self._notify.hosts)
        self._backend_name, self._backend_options = backend, backend_options
        policy, fixed = policy or make_policy(DEFAULT_POLICY), allocations is not None
        self._strategy: Strategy = (
            FixedStrategy(allocations or {}) if fixed else PolicyStrategy(policy)
        )
        self._policy_name = "fixed" if fixed else type(policy).__name__
        self._policy_options = {} if fixed else getattr(policy, "options", {})
        self._autoscaler: Autoscaler | None = None
        if not fixed and autoscaling is not None and expander is not None:
            self._autoscaler = Autoscaler(autoscaling, expander, policy, on_change=self._note_nodes)
        self._interval, self._restart_seconds = interval, restart_seconds
        self._heartbeat_timeout, self._open_metrics = heartbeat_timeout, open_metrics
        self._address = address or ServerAddress()
        self._grace, self._pass_on = grace, pass_environment
        self._on_event, self._event_types = on_event, event_types
        self._environment = {
            **variables.HINTS_INTERVAL.write(hints_interval),
            **variables.CHECKPOINT_INTERVAL.write(checkpoint_interval),
            **variables.HEARTBEAT_INTERVAL.write(heartbeat_timeout / 6),
            **variables.FROZEN_TIMEOUT.write(heartbeat_timeout),
        }
        self._metrics = SchedulerMetrics()
        self._resources = ExitStack()
        self._started = self._serving = self._stopping = self._abandoned = False
        self._deciding = threading.Lock()
        self._reconsider = threading.Event()
        self._ending = threading.Event()
        self._threads = VitalThreads(self._ending)

    # Life

    def start(self, connecting: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """Lock the state directory and begin to schedule; return when requests are answered.

        Args:
            connecting: the context in which the engine connects to its cluster, which may block; an
                exception that it raises there ends the start.

        Raises:
            StateDirError: another scheduler serves it, or it cannot be written.
            StoreError: its store cannot be used by this version.
            HttpServerError: the address cannot be listened on.
            TlsError: the certificate cannot be used.
            BackendError: processes of an earlier scheduler cannot be ended.
        """
        if self._started:
            raise RuntimeError("a scheduler is started once; make another one")
        self._started = True
        self.state_dir.create()
        with ExitStack() as resources:
            # Resources are released in reverse order, whatever happens.
            resources.enter_context(self.state_dir.lock())
            self._open_store(resources)
            self._start_feed(resources)
            self._make_notifier(resources)
            self._start_backend(resources, connecting)
            self._start_server(resources)
            self._controller.take_over(self.url)
            if self._autoscaler is not None:
                resources.callback(self._autoscaler.stop)
                self._threads.watch(self._autoscaler.start())
            self._controller.start(self._threads, resources, self._ending)
            self._threads.start(resources, "allocator", self._allocation().run, self._reconsider)
            self._start_forecasts(resources)
            self._threads.start(resources, "notify", self._notifier.run, self._ending)
            resources.callback(self._notifier.wake)
            resources.callback(self._ending.set)
            self._resources = resources.pop_all()
            self._serving = True

    def stop(self, grace: float | None = None, hurry: Callable[[], bool] = lambda: False) -> None:
        """End every job's processes, and everything else; the store keeps all progress.

        May be called repeatedly, and in any state. Jobs have `grace` seconds to save (None: the
        constructor's) or until `hurry` returns True; everything else gives up after a few.
        """
        with self._deciding:
            if self._stopping or not self._serving:
                return
            self._stopping = True
        with self._resources:
            self._controller.executor.stop_all(self._grace if grace is None else grace, hurry)

    def abandon(self) -> None:
        """End without stopping jobs: another scheduler has taken over them and the store."""
        with self._deciding:
            self._stopping = self._abandoned = True
        self._resources.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    # Requests of users and jobs

    @property
    def url(self) -> str:
        """The URL for jobs and users."""
        return self._address.advertised(self._server.port)

    @property
    def listening_url(self) -> str:
        """The URL with the address that it listens on."""
        return self._server.url

    @property
    def admin_token(self) -> str:
        """The token with all rights."""
        return self.state_dir.admin_token()

    @property
    def failure(self) -> str | None:
        """Why the scheduler cannot continue, although it was not stopped; None: it can."""
        return None if self._stopping else self._threads.failure

    @property
    def lost(self) -> str | None:
        """Why the cluster can never run anything again, in one sentence; None: it can."""
        return self._controller.lost

    @property
    def store(self) -> Store:
        """The state of the scheduler."""
        return self._store

    @property
    def control(self) -> JobService:
        """Carries out commands of users."""
        return self._controller.control

    def submit(self, spec: JobSpec) -> JobRecord:
        """Submit a job: see `JobService.submit`."""
        return self.control.submit(spec)

    def jobs(self) -> dict[str, JobRecord]:
        """Return all jobs by name, in the order of submission."""
        return {job.name: job for job in self._store.jobs()}

    def wait(
        self, predicate: Callable[[Mapping[str, JobRecord]], bool], timeout: float | None = None
    ) -> bool:
        """Return whether a condition on the jobs becomes true within `timeout` seconds."""
        return wait_until(self._store, lambda: predicate(self.jobs()), timeout)

    # Start

    def _open_store(self, resources: ExitStack) -> None:
        where = self._store_url or self.state_dir.store
        self._store = resources.enter_context(Store(where, create=True))
        self._store.acquire_leader_lock()
        if self._store_url is None:
            self.state_dir.check_known(where, self._store.last_event())
        else:
            self.state_dir.keep_store(self._store_url)

    def _start_feed(self, resources: ExitStack) -> None:
        if self._on_event is not None:
            after = self._store.last_event()
            feed = EventFeed(self._store, self._on_event, after, self._event_types)
            feed.start()
            self._threads.watch(feed.thread)
            resources.callback(feed.stop)

    def _make_notifier(self, resources: ExitStack) -> None:
        def why_waiting(job: JobRecord) -> str | None:
            return explanation(self._store, job).waits_for

        self._notifier = Notifier(self._store, self._notify, why_waiting, self._ending)
        resources.callback(self._notifier.close)

    def _start_backend(
        self, resources: ExitStack, connecting: Callable[[], AbstractContextManager[object]]
    ) -> None:
        options = EngineOptions(
            state_dir=self.state_dir,
            cluster=self._cluster,
            grace=self._grace,
            pass_environment=self._pass_on,
            own=self._backend_options,
        )
        with connecting():
            engine = make_engine(self._backend_name, options)
            resources.callback(engine.close)
        if engine.even and not isinstance(self._strategy, FixedStrategy):
            self._strategy = EvenStrategy(self._strategy)
        backend = ReplicaGroupManager(
            engine, self._store.launches, self.state_dir, grace=self._grace
        )
        self._controller = Controller(
            self._store,
            backend,
            self.state_dir,
            environment=self._environment,
            plan_settings={
                "policy": self._policy_name,
                "policy_options": self._policy_options,
                "restart_seconds": self._restart_seconds,
                "interval": self._interval,
                "even": engine.even,
            },
            grace=self._grace,
            heartbeat_timeout=self._heartbeat_timeout,
            reconsider=self._reconsider.set,
            stopping=lambda: self._stopping,
            teams=self._teams,
            notifier=self._notifier,
            notify_hosts=self._notify.hosts,
        )
        resources.callback(self._end_processes)

    def _end_processes(self) -> None:
        # If the start fails, or the store was lost, running jobs are left to the next scheduler.
        if self._serving and not self._abandoned:
            self._controller.end_processes()

    def _start_server(self, resources: ExitStack) -> None:
        app = create_app(
            self._store,
            self.control,
            state_dir=self.state_dir,
            admin_token=self.admin_token,
            metrics=self._metrics,
            open_metrics=self._open_metrics,
            hosts=self._address.hosts(),
        )
        killed = self.state_dir.read_server()  # its jobs still report to its address
        preferred = killed.port if killed else 0
        at = self._address
        tick = self.control.listening.tick
        self._server = HttpServer(app, at.host, at.port, preferred, tls=at.tls, tick=tick)
        resources.callback(self._server.stop)
        resources.callback(end_waiting, app)
        self._server.start()
        self._threads.watch(self._server.thread)
        self._environment |= at.environment(self._server.port)
        self.state_dir.write_server(at.server_info(self._server.port, self.admin_token))
        # Jobs that are left running report to this address.
        resources.callback(lambda: None if self._abandoned else self.state_dir.remove_server())

    # Threads

    def _note_nodes(self, plan: NodePlan) -> None:
        data = {"desired": plan.num_nodes, "drain": plan.drain, "release": plan.release}
        self._store.add_event("autoscaling", data)

    def _allocation(self) -> AllocationLoop:
        allocator = Allocator(
            SnapshotReader(self._store, restart_seconds=self._restart_seconds),
            self._strategy,
            carry_out=self._carry_out,
            keep_notices=self._store.teams.set_notices,
            metrics=self._metrics,
        )
        return AllocationLoop(
            allocator,
            interval=self._interval,
            reconsider=self._reconsider,
            ending=self._ending,
            autoscaler=self._autoscaler,
        )

    def _start_forecasts(self, resources: ExitStack) -> None:
        if not self._forecasts or not can_simulate(self._store):
            return
        process = ForecastProcess(self.state_dir.store)
        loop = ForecastLoop(self._store, process, ending=self._ending, share=self._forecasts)
        self._threads.start(resources, "forecasts", loop.run, self._ending)
        # First the event, so that the end of the process is no failure; then the join.
        resources.callback(process.close)
        resources.callback(self._ending.set)

    def _carry_out(self, events: Sequence[tuple[str, Allocate]]) -> None:
        # The lock of `stop`: otherwise a decision could start a job after it.
        with self._deciding:
            if not self._stopping:
                self._controller.executor.handle_all(events)
