"""Execution of the actions of job life cycles: the bridge between store and backend.

`Executor.handle` applies an event to a job: the store computes and keeps the new state, and the
resulting actions are queued in the same order. `Executor.step` carries them out, polls the backend
for events, and applies those in turn. `step` belongs to one thread; `handle` to any.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

from pipollux_sched.backend import BackendError, ReplicaGroupManager, ReplicaProgram, Report
from pipollux_sched.backend.base import POLL_INTERVAL, NodesGoneError
from pipollux_sched.lifecycle import (
    Action,
    ChangeOverdue,
    ElasticReady,
    EndReplicas,
    Event,
    Exited,
    GiveUpAfter,
    JoiningReplicaLost,
    Kill,
    Outcome,
    Phase,
    Record,
    Retry,
    RetryAfter,
    Shutdown,
    Start,
    StartReplicas,
    Stop,
    Switched,
)
from pipollux_sched.spec.job import ExitCodesSpec, ExitRule, SpecError
from pipollux_sched.store import AttemptRecord, JobRecord, Point, Store, UnknownJobError
from pipollux_sched.utils.failure_log import FailureLog

from .training_report import take_unsent_report

_LOG = logging.getLogger(__name__)

TICK = 0.2
"""Seconds between two polls of the processes."""
TICK_EACH = 2.5e-4
"""The same per running job, if that is more in total: polling thousands of jobs takes long."""
STOP_PATIENCE = 5.0
"""Seconds beyond their grace period for which jobs that were asked to stop are awaited."""
HARD_GRACE = 5.0
"""Grace period in seconds of an attempt that has trained nothing yet."""


class Executor:
    """Applies events to jobs, and carries out the resulting actions.

    A job has `grace` seconds to checkpoint after a stop request. `on_ended` is called when a job
    has ended, or waits for an allocation.
    """

    def __init__(
        self,
        store: Store,
        backend: ReplicaGroupManager,
        program: Callable[[JobRecord], ReplicaProgram],
        *,
        grace: float,
        on_ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._backend = backend
        self._program = program
        self._grace = grace
        self._on_ended = on_ended
        self._lock = threading.Lock()
        self._todo: deque[tuple[str, Action]] = deque()
        self._reports: deque[Report] = deque()
        self._retries: list[tuple[float, int, str, Event]] = []
        self._order = itertools.count()
        self.woken = threading.Event()

    def handle(self, name: str, event: Event) -> JobRecord:
        """Apply an event to a job; the next `step` carries out the resulting actions."""
        # One lock for both: otherwise two threads could queue actions in the wrong order.
        with self._lock:
            change = self._store.transition(name, event)
            self._todo.extend((name, action) for action in change.actions)
        self._admit(event, change.job)
        if change.actions:
            self.woken.set()
        if _frees(event, change.job):
            self._on_ended()
        return change.job

    def handle_all(self, events: Sequence[tuple[str, Event]]) -> list[JobRecord | None]:
        """Apply events to jobs in one transaction; None for a job that was deleted."""
        with self._lock:
            changes = self._store.transition_all(events)
            for (name, event), change in zip(events, changes, strict=True):
                if change is None:
                    _LOG.warning("%s is for job %s, which is gone", type(event).__name__, name)
                else:
                    self._todo.extend((name, action) for action in change.actions)
        for (_, event), change in zip(events, changes, strict=True):
            if change is not None:
                self._admit(event, change.job)
        if self._todo:
            self.woken.set()
        pairs = zip(events, changes, strict=True)
        if any(_frees(event, change.job) for (_, event), change in pairs if change is not None):
            self._on_ended()
        return [None if change is None else change.job for change in changes]

    def _admit(self, event: Event, job: JobRecord) -> None:
        if isinstance(event, Switched | ElasticReady):
            membership = job.state.membership
            can_survive = membership.why_not is None
            self._backend.admit(
                job.name, event.attempt, membership.replicas, can_survive=can_survive
            )

    def run(self, ending: threading.Event) -> None:
        """Carry out actions until the scheduler stops."""
        failures = FailureLog(_LOG, "the executor")
        while not ending.is_set():
            try:
                self.step()
            except Exception as error:  # an error of one job must not end the others
                failures.failed(error)
                ending.wait(1.0)
            else:
                failures.succeeded()
            self.wait(max(TICK, TICK_EACH * len(self._backend.running())))

    def wait(self, timeout: float) -> None:
        """Wait until an action is queued, or `timeout` seconds have passed."""
        self.woken.wait(timeout)
        self.woken.clear()

    def stop_all(self, grace: float, hurry: Callable[[], bool]) -> None:
        """Ask all jobs to checkpoint and end; wait for `grace` seconds at most, or `hurry()`."""
        self._grace = min(self._grace, grace)
        for job in self._store.jobs(unfinished=True):
            self.handle(job.name, Shutdown())
        deadline = time.monotonic() + grace + STOP_PATIENCE
        while self._backend.running() and time.monotonic() < deadline and not hurry():
            time.sleep(POLL_INTERVAL)

    def step(self) -> None:
        """Carry out queued actions, and apply the backend's events; nothing is lost by an error."""
        while self._retries and self._retries[0][0] <= time.monotonic():
            _, _, name, retry = self._retries[0]
            with suppress(UnknownJobError):  # it was cancelled and deleted meanwhile
                self.handle(name, retry)
            heapq.heappop(self._retries)
        self._act()
        self._reports.extend(self._backend.poll())
        while self._reports:
            # Batch them: thousands of jobs may start or end at once, and each transaction waits for
            # the disk.
            kind, found = next(groupby(self._reports, key=lambda each: type(each.event)))
            alike = list(found)
            if kind is Exited:
                self._take_in_ends(alike)
            else:
                self.handle_all([(each.job, each.event) for each in alike])
            for _ in alike:
                self._reports.popleft()
        self._act()

    def _act(self) -> None:
        while self._todo:
            name, action = self._todo[0]
            match action:
                case Start():
                    self._start(name, action)
                case Stop():
                    self._stop(name, action)
                case Kill():
                    self._kill(name, action)
                case StartReplicas():
                    self._start_replicas(name, action)
                case EndReplicas():
                    self._backend.end_replicas(
                        name, action.attempt, action.replicas, at_once=action.at_once
                    )
                case RetryAfter():
                    self._later(action.seconds, name, Retry(action.attempt))
                case GiveUpAfter():
                    why = f"Joining replicas did not reach its step within {action.seconds:g} s."
                    overdue = ChangeOverdue(action.attempt, action.number, why)
                    self._later(action.seconds, name, overdue)
                case Record():  # the store has done it
                    pass
            self._todo.popleft()

    def _later(self, seconds: float, name: str, event: Event) -> None:
        due = time.monotonic() + seconds
        heapq.heappush(self._retries, (due, next(self._order), name, event))

    def _start_replicas(self, name: str, action: StartReplicas) -> None:
        job = self._store.job(name)
        try:
            program = self._program(job)
        except (SpecError, OSError) as error:
            for replica, _ in action.replicas:
                self.handle(name, JoiningReplicaLost(action.attempt, replica, str(error)))
            return
        if job.state.running_stages is not None:
            program = replace(program, num_stages=job.state.running_stages)
        self._backend.start_replicas(program, action.attempt, dict(action.replicas))

    def _start(self, name: str, action: Start) -> None:
        try:
            program = self._program(self._store.job(name))
            if action.num_stages is not None:
                program = replace(program, num_stages=action.num_stages)
            self._backend.apply(program, action.attempt, action.nodes)
        except NodesGoneError as error:
            newest = self._backend.newest_checkpoint(name, action.attempt - 1)
            said = f"Node {error}."
            gone = Exited(action.attempt, Outcome.STOPPED, message=said, checkpoint=newest)
            self.handle(name, gone)
        except (BackendError, SpecError, OSError) as error:
            _LOG.warning("attempt %d of job %s: %s", action.attempt, name, error)
            failed = Exited(action.attempt, Outcome.FAILED, message=str(error))
            self.handle(name, failed)

    def _stop(self, name: str, action: Stop) -> None:
        grace = self._grace if action.graceful else min(self._grace, HARD_GRACE)
        if not self._backend.stop(name, grace):
            gone = Exited(action.attempt, Outcome.FAILED, message="Nothing of it was running.")
            self.handle(name, gone)

    def _kill(self, name: str, action: Kill) -> None:
        if not self._backend.kill(name, action.why):
            gone = Exited(action.attempt, Outcome.FAILED, message=action.why)
            self.handle(name, gone)

    def _take_in_ends(self, reports: Sequence[Report]) -> None:
        ends = [(each, each.event) for each in reports if isinstance(each.event, Exited)]
        for report, event in ends:
            if report.unsent is not None:
                with suppress(UnknownJobError):  # it was deleted meanwhile
                    take_unsent_report(self._store, report.unsent, report.job, event.attempt)
        points = self._store.last_points([report.job for report, _ in ends])
        self.handle_all(
            [(each.job, self._completed(each.job, event, points)) for each, event in ends]
        )
        # Only after the commit: otherwise the next scheduler could not know how it ended.
        for report, event in ends:
            self._backend.forget(report.job, event.attempt)

    def _completed(self, name: str, event: Exited, points: Mapping[str, Point]) -> Exited:
        """Add the training's progress; a script that has trained before is able to start."""
        if event.cannot_start and any(map(_has_trained, self._store.attempts(name))):
            event = replace(event, cannot_start=False)
        if event.outcome is Outcome.FAILED and event.status is not None:
            event = replace(event, rule=self._rule_for(name, event.status))
        point = points.get(name)
        # For an incomplete attempt, the step must remain that of its checkpoint.
        if point is None or event.outcome is not Outcome.COMPLETE:
            return event
        # Points count epochs from 0; the number of completed epochs is one more.
        return replace(event, step=point.step, epoch=point.epoch + 1)

    def _rule_for(self, name: str, status: int) -> ExitRule:
        with suppress(UnknownJobError):  # it was deleted meanwhile
            codes = self._store.job(name).spec.get("exit_codes") or {}
            return ExitCodesSpec.model_validate(codes).rule_for(status)
        return "retry"


def _frees(event: Event, job: JobRecord) -> bool:
    waits = job.phase is Phase.QUEUED and isinstance(event, Exited)
    return job.phase.ended or job.phase is Phase.SUSPENDED or waits


def _has_trained(record: AttemptRecord) -> bool:
    return record.first_step_at is not None or record.outcome == Outcome.STOPPED.value
