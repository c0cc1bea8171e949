"""The scheduler's persistent store, and the only way to change it.

Every method is one transaction: when it returns, the change is on disk, so acknowledged changes
survive the end of the scheduler. Changes of a job's state go through `Store.transition`, which
computes the new state, writes it with its events, and returns the actions to carry out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from sqlalchemy import String, cast, func, select

from pipollux_sched.lifecycle import Event

from . import attempts, job_list, journal, reports, retention
from . import nodes as node_rows
from .attempts import moving_average
from .database import Database
from .deletion import Deletions
from .dependencies import waits_of
from .devices import DeviceRecords
from .errors import StoreError
from .families import Families
from .forecasts import ForecastRecords
from .heartbeats import HeartbeatRecords
from .job_cache import JobCache
from .job_list import JobQuery
from .journal import Change, RunTime, StartingJob
from .launches import LaunchRecords
from .notifications import NotificationRecords
from .queries import Overview
from .records import (
    AttemptRecord,
    JobRecord,
    NodeCondition,
    NodeRecord,
    Point,
    Timeline,
    job_record,
)
from .replicas import ReplicaAddresses
from .reports import MetricValue, ReceivedHints, ReceivedReport
from .submissions import Submission, check_free, run_again, take_in
from .sweeps import Sweeps
from .tables import EventRow, HintsRow, JobRow
from .teams import TeamRecords
from .tokens import TokenRecords

LONGEST = 1.0
"""Seconds after which the predicate is called again without any change."""


class Store:
    """The store of one scheduler; thread-safe, and readable by other processes.

    Example:
        >>> with Store(Path("/var/lib/pipollux/pipollux.db"), create=True) as store:
        ...     [job.name for job in store.jobs()]
        []

    Args:
        where: an SQLite file, or the URL of a database: ``postgresql://USER@HOST/DATABASE``.
        create: create the store if it is missing.
        clock: returns the time, in seconds since the epoch.

    Raises:
        StoreError: there is no store, or this version cannot read it.
    """

    def __init__(
        self, where: Path | str, *, create: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self._database = Database(where, create=create)
        self._clock = clock
        self.present = JobCache(self.job)
        """Cache of the jobs that replicas read frequently."""
        self._database.on_jobs_changed = self.present.keep
        self.replicas = ReplicaAddresses(self._database, clock)
        self.heartbeats = HeartbeatRecords(self._database, clock)
        self.launches = LaunchRecords(self._database)
        self.overview = Overview(self._database)
        self.families = Families(self._database)
        """Measurements that new jobs start with."""
        self.teams = TeamRecords(self._database, clock, self.families.forget)
        self.tokens = TokenRecords(self._database, clock)
        self.deletions = Deletions(self._database, clock)
        self.sweeps = Sweeps(self._database, clock)
        self.forecasts = ForecastRecords(self._database, clock)
        self.devices = DeviceRecords(self._database, clock)
        self.notifications = NotificationRecords(self._database, clock)

    def acquire_leader_lock(self) -> None:
        """Become the only scheduler that serves the store, until it is closed.

        Raises:
            StoreTakenError: another scheduler serves it. A scheduler that later loses the lock with
                its connection gets this error from every write.
        """
        self._database.acquire_leader_lock()

    def check_leader_lock(self) -> None:
        """Raise `StoreTakenError` if another scheduler has taken over the store."""
        self._database.check_leader_lock()

    def close(self) -> None:
        """Close the store; it must not be used afterwards."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def version(self) -> int:
        """Number of commits by this object; for `wait`."""
        return self._database.version

    def wait(self, version: int, timeout: float) -> int:
        """Wait up to `timeout` seconds for a commit after `version`; return the new version."""
        return self._database.wait(version, timeout)

    # Jobs

    def submit(
        self,
        name: str,
        spec: Mapping[str, Any],
        token: str,
        max_restarts: int,
        deadline: float | None = None,
    ) -> Change:
        """Add a job, or restart a failed or cancelled one: see `Submission`.

        Raises:
            JobExistsError: a job with this name has not ended, or is complete.
            TeamFullError: its team has reached its limit of unfinished jobs.
            DependencyError: it waits for an unknown job, or can never start.
        """
        return self.submit_all([Submission(name, spec, token, max_restarts, deadline)])[0]

    def check_free(self, specs: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise the error with which `submit_all` would refuse jobs; store nothing."""
        with self._database.read() as session:
            check_free(session, specs)
            for name, spec in specs.items():
                waits_of(session, name, spec, specs)

    def submit_all(self, submissions: Sequence[Submission]) -> list[Change]:
        """Add jobs as in `submit`: all of them or, if one is refused, none."""
        with self._database.write() as session:
            return take_in(session, submissions, self._clock())

    def rerun(self, name: str, *, from_scratch: bool) -> Change:
        """Run an ended job again, with its original spec, from its last checkpoint or from scratch.

        Raises:
            JobUnfinishedError: it has not ended.
            JobEndedError: it is complete, and `from_scratch` is False.
            TeamFullError: its team has reached its limit of unfinished jobs.
        """
        with self._database.write() as session:
            return run_again(session, name, self._clock(), from_scratch=from_scratch)

    def job(self, name: str) -> JobRecord:
        """Return a job, or raise `UnknownJobError`."""
        with self._database.read() as session:
            return job_record(journal.find_job(session, name))

    def jobs(self, *, unfinished: bool = False) -> list[JobRecord]:
        """Return all jobs, or those that have not ended, in the order of their first submission."""
        query = select(JobRow).order_by(JobRow.id)
        if unfinished:
            query = query.where(JobRow.phase.not_in(attempts.ENDED))
        with self._database.read() as session:
            return [job_record(row) for row in session.scalars(query)]

    def find_jobs(self, query: JobQuery) -> tuple[list[JobRecord], int]:
        """Return a page of jobs, and how many match the filter on all pages."""
        with self._database.read() as session:
            found = job_list.page_of(select(JobRow), query, self._clock())
            jobs = [job_record(row) for row in session.scalars(found)]
            return jobs, job_list.count(session, query)

    def transition(self, name: str, event: Event) -> Change:
        """Apply an event to a job: see `pipollux_sched.lifecycle.advance`."""
        with self._database.write() as session:
            row = journal.find_job(session, name)
            return journal.advance_job(session, row, event, self._clock())

    def transition_all(self, events: Sequence[tuple[str, Event]]) -> list[Change | None]:
        """Apply events to jobs, in one transaction; None for an unknown job."""
        with self._database.write() as session:
            return journal.advance_all(session, events, self._clock())

    def overdue(self) -> list[JobRecord]:
        """Return the unfinished jobs whose deadline has passed without having been applied."""
        with self._database.read() as session:
            return journal.overdue(session, self._clock())

    def over_run_time(self) -> list[RunTime]:
        """Return the running jobs whose processes have run for longer than `max_run_time`."""
        with self._database.read() as session:
            return journal.over_run_time(session, self._clock())

    def starting(self) -> list[StartingJob]:
        """Return the jobs whose processes run and have taken no step yet."""
        with self._database.read() as session:
            return journal.starting(session)

    @property
    def now(self) -> float:
        """The time by the store's clock, in seconds since the epoch."""
        return self._clock()

    # Reports of jobs

    def put_hints(self, name: str, attempt: int, hints: Mapping[str, Any]) -> None:
        """Store the hints of a job as JSON; `StaleAttemptError`: not of the current attempt."""
        (problem,) = self.put_all_hints([ReceivedHints(name, attempt, hints)])
        if problem is not None:
            raise problem

    def put_all_hints(self, received: Sequence[ReceivedHints]) -> list[StoreError | None]:
        """Store hints of several jobs; return for each the reason of a refusal, None if stored."""
        with self._database.write(durable=False) as session:
            return reports.keep_hints(session, received, self._clock())

    def hints(self, *, unfinished: bool = False) -> dict[str, dict[str, Any]]:
        """Return the latest hints by job, as JSON; `unfinished`: of jobs that have not ended."""
        query = select(HintsRow).where(attempts.among_jobs(HintsRow.job, unfinished=unfinished))
        with self._database.read() as session:
            return {row.job: row.hints for row in session.scalars(query)}

    def hint_texts(self) -> dict[str, str]:
        """Return the latest hints of the jobs that have not ended, as unparsed JSON."""
        query = select(HintsRow.job, cast(HintsRow.hints, String))
        unfinished = query.where(attempts.among_jobs(HintsRow.job, unfinished=True))
        with self._database.read() as session:
            return {row[0]: row[1] for row in session.execute(unfinished)}

    def hint_moments(self) -> dict[str, tuple[int, float]]:
        """Return the attempt and the time of the latest hints of the jobs that have not ended."""
        query = select(HintsRow.job, HintsRow.attempt, HintsRow.time)
        unfinished = query.where(attempts.among_jobs(HintsRow.job, unfinished=True))
        with self._database.read() as session:
            return {row[0]: (row[1], row[2]) for row in session.execute(unfinished)}

    def hint_text(self, name: str) -> str | None:
        """Return the latest hints of a job, also of an ended one, as unparsed JSON."""
        query = select(cast(HintsRow.hints, String)).where(HintsRow.job == name)
        with self._database.read() as session:
            return session.scalar(query)

    def add_report(
        self,
        name: str,
        attempt: int,
        points: Sequence[Point],
        timeline: Timeline | None = None,
        metrics: Sequence[MetricValue] = (),
    ) -> bool:
        """Store a training report; return whether it had the first step of the attempt.

        `StaleAttemptError`: `attempt` is not the current one.
        """
        received = reports.ReceivedReport(name, attempt, points, timeline, metrics)
        (outcome,) = self.add_all_reports([received])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def add_all_reports(self, received: Sequence[ReceivedReport]) -> list[bool | Exception]:
        """Store reports of several jobs; return for each the result or error of `add_report`."""
        with self._database.write(durable=False) as session:
            return reports.keep_reports(session, received, self._clock())

    def last_points(self, names: Collection[str] | None = None) -> dict[str, Point]:
        """Return the latest progress by job (None: of all); jobs without reports are left out."""
        with self._database.read() as session:
            return journal.last_points(session, names)

    # Attempts

    def attempts(self, name: str) -> list[AttemptRecord]:
        """Return the attempts of a job, oldest first."""
        with self._database.read() as session:
            return attempts.of_job(session, name)

    def num_attempts(
        self, names: Collection[str] | None = None, *, unfinished: bool = False
    ) -> dict[str, int]:
        """Return the number of starts by job (None: of all); jobs never started are left out."""
        with self._database.read() as session:
            return attempts.count(session, names, unfinished=unfinished)

    def attained_service(self, *, unfinished: bool = False) -> dict[str, float]:
        """Return the slot-seconds of started jobs, summed over their attempts."""
        with self._database.read() as session:
            return attempts.attained_service(session, self._clock(), unfinished=unfinished)

    def restart_seconds(self, name: str, default: float) -> float:
        """Return the moving average of a job's restart costs in seconds; `default` if none."""
        with self._database.read() as session:
            return moving_average(attempts.restart_seconds(session, name).get(name, ()), default)

    def restart_costs(self) -> dict[str, float]:
        """Return the same for all jobs that have not ended and have restarted."""
        with self._database.read() as session:
            measured = attempts.restart_seconds(session)
        return {job: moving_average(seconds, 0.0) for job, seconds in measured.items()}

    def pause_costs(self) -> dict[str, float]:
        """Return the moving average of the pauses of elastic resizes, by job."""
        with self._database.read() as session:
            measured = attempts.pause_seconds(session)
        return {job: moving_average(seconds, 0.0) for job, seconds in measured.items()}

    def num_changes(self) -> dict[str, int]:
        """Return the number of elastic resizes by job, for jobs that have not ended."""
        with self._database.read() as session:
            return {job: len(costs) for job, costs in attempts.pause_seconds(session).items()}

    # Events

    def add_event(self, kind: str, data: Mapping[str, Any]) -> None:
        """Log an event of no job."""
        with self._database.write() as session:
            journal.log(session, self._clock(), kind, None, None, data)

    def last_event(self) -> int:
        """Return the id of the newest event; 0 if there is none."""
        with self._database.read() as session:
            return session.scalar(select(func.max(EventRow.id))) or 0

    def events(
        self,
        after: int = 0,
        *,
        job: str | None = None,
        types: Collection[str] | None = None,
        limit: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return the oldest events after an id, in chronological order, each as one flat object."""
        query = journal.events_of(job, types).where(EventRow.id > after)
        with self._database.read() as session:
            rows = session.execute(query.order_by(EventRow.id).limit(limit))
            return [journal.event_object(event, point) for event, point in rows]

    def prune(self, now: float) -> int:
        """Thin periodic events (`.retention`) for at most a second; return the number deleted."""
        return retention.prune(self._database, now)

    def num_bytes(self) -> int:
        """Return the size of the store, in bytes."""
        return self._database.num_bytes()

    def latest_events(
        self, limit: int, *, job: str | None = None, types: Collection[str] | None = None
    ) -> list[dict[str, Any]]:
        """Return the newest events, at most `limit`, in chronological order; see `events`."""
        query = journal.events_of(job, types).order_by(EventRow.id.desc())
        with self._database.read() as session:
            rows = session.execute(query.limit(limit)).all()
            return [journal.event_object(event, point) for event, point in reversed(rows)]

    # Nodes

    def set_nodes(self, nodes: Iterable[tuple[str, int, str, Mapping[str, Any]]]) -> None:
        """Store the served nodes: name, slots, kind, spec. Known nodes keep their condition."""
        with self._database.write() as session:
            node_rows.remember(session, nodes, self._clock())

    def set_node_condition(
        self, name: str, condition: NodeCondition, reason: str = ""
    ) -> NodeRecord:
        """Set a node's condition, or raise `UnknownNodeError`; an event records a change."""
        with self._database.write() as session:
            return node_rows.set_condition(session, name, condition, reason, self._clock())

    def nodes(self) -> dict[str, NodeRecord]:
        """Return the nodes served last, by name."""
        with self._database.read() as session:
            return node_rows.all_nodes(session)


def wait_until(store: Store, predicate: Callable[[], bool], timeout: float | None) -> bool:
    """Return whether a predicate becomes true within `timeout` seconds (None: no limit)."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        version = store.version
        if predicate():
            return True
        left = LONGEST if deadline is None else deadline - time.monotonic()
        if left <= 0:
            return False
        store.wait(version, min(left, LONGEST))
