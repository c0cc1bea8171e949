"""The watchdog: deadlines, lost heartbeats, stalled training loops, expired entries."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from pipollux_sched.lifecycle import (
    Event,
    Expire,
    HeartbeatLost,
    JobState,
    JoiningReplicaLost,
    Stalled,
    StartOverdue,
    can_survive,
)
from pipollux_sched.spec.job import DEFAULT_START_TIMEOUT
from pipollux_sched.store import JobRecord, RunTime, Store, UnknownJobError
from pipollux_sched.utils.failure_log import FailureLog
from pipollux_utils.text import spell_duration

from .heartbeats import Heartbeats, LostReplica, StalledJob

_LOG = logging.getLogger(__name__)

LOOK_INTERVAL = 1.0
TIDY_INTERVAL = 5.0
"""Seconds between two writes of heartbeats and clean-ups of the store."""
HEARTBEAT_TIMEOUT = 60.0
"""Seconds without a heartbeat after which a replica counts as lost."""
EXIT_TIMEOUT = 60.0
"""Seconds for processes to end after the scripts of all replicas have ended."""
_LINGERING = (
    f"The scripts of all replicas have ended, but not all processes did within "
    f"{EXIT_TIMEOUT:g} s, so all were ended."
)


class Watchdog:
    """Checks periodically whether anything is overdue, and applies the event.

    Args:
        look_at_nodes: called at each check.
        tidy: called after each pruning of the store, for further clean-up.
    """

    def __init__(
        self,
        store: Store,
        heartbeats: Heartbeats,
        handle: Callable[[str, Event], object],
        *,
        ending: threading.Event,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        look_at_nodes: Callable[[], None] = lambda: None,
        tidy: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._heartbeats = heartbeats
        self._handle = handle
        self._ending = ending
        self._heartbeat_timeout = heartbeat_timeout
        self._look_at_nodes = look_at_nodes
        self._tidy = tidy
        self._told_slow: set[tuple[str, int]] = set()

    def run(self) -> None:
        """Check every second until the scheduler stops; sometimes store heartbeats and prune."""
        tidy_at = time.monotonic() + TIDY_INTERVAL
        failures = FailureLog(_LOG, "the watchdog")
        while not self._ending.wait(LOOK_INTERVAL):
            try:
                self.look()
                if time.monotonic() >= tidy_at:
                    self._store.heartbeats.keep(self._heartbeats.take_changed())
                    self._store.prune(time.time())
                    self._tidy()
                    tidy_at = time.monotonic() + TIDY_INTERVAL
                    failures.succeeded()  # only after a successful write, too
            except Exception as error:  # an error, such as a full disk, must not end the watchdog
                if self._ending.is_set():
                    return
                failures.failed(error)

    def look(self) -> None:
        """End jobs whose deadline has passed, and attempts that are lost or stalled."""
        self._look_at_nodes()
        for job in self._store.overdue():
            self._let(job.name, Expire(_why_overdue(job)))
        for over in self._store.over_run_time():
            self._let(over.name, Expire(_why_over(over), run_time=True))
        told: set[tuple[str, int]] = set()
        for lost in self._heartbeats.lost(self._heartbeat_timeout):
            if (lost.job, lost.attempt) not in told and self._lose(lost):
                told.add((lost.job, lost.attempt))
        for name, attempt in self._heartbeats.lingering(EXIT_TIMEOUT):
            self._let(name, HeartbeatLost(attempt, _LINGERING))
            self._heartbeats.forget(name, attempt)
        for stalled in self._heartbeats.stalled():
            self._let(stalled.job, Stalled(stalled.attempt, _why_stalled(stalled)))
            self._heartbeats.forget(stalled.job, stalled.attempt)
        self._end_slow_starts()

    def _end_slow_starts(self) -> None:
        starting = {(job.name, job.attempt): job for job in self._store.starting()}
        self._told_slow &= starting.keys()
        for key, job in starting.items():
            limit = job.spec.get("start_timeout", DEFAULT_START_TIMEOUT)
            if limit is None or key in self._told_slow or self._store.now - job.started_at < limit:
                continue
            self._let(job.name, StartOverdue(job.attempt, _why_slow(limit)))
            self._told_slow.add(key)

    def _lose(self, lost: LostReplica) -> bool:
        """Record a lost replica; return whether its attempt ends with it."""
        name, attempt, replica, seconds = lost
        # Forget a replica only after the store has recorded its loss: otherwise the next check
        # retries.
        state = self._state(lost)
        if state is not None and replica not in state.membership.replicas:
            why = f"Replica {replica} sent no heartbeat for {seconds:.0f} s before it took part."
            self._let(name, JoiningReplicaLost(attempt, replica, why))
            self._heartbeats.forget(name, attempt, replica)
            return False
        silent = f"Replica {replica} sent no heartbeat for {seconds:.0f} s"
        if state is not None and can_survive(state, [replica]):
            self._let(name, HeartbeatLost(attempt, f"{silent}, so it was ended.", replica))
            self._heartbeats.forget(name, attempt, replica)
            return False
        self._let(name, HeartbeatLost(attempt, f"{silent}, so all were ended."))
        self._heartbeats.forget(name, attempt)
        return True

    def _state(self, lost: LostReplica) -> JobState | None:
        """Return the state of a lost replica's job; None if its attempt is not the current one."""
        try:
            state = self._store.job(lost.job).state
        except UnknownJobError:
            return None
        return state if state.attempt == lost.attempt else None

    def _let(self, name: str, event: Event) -> None:
        try:
            self._handle(name, event)
        except UnknownJobError:
            _LOG.warning("job %s is gone", name)


def _why_overdue(job: JobRecord) -> str:
    deadline = datetime.fromtimestamp(job.deadline_at or 0.0, UTC).isoformat(" ", "seconds")
    return f"The deadline, {deadline}, has passed; submit the job again to let it go on."


def _why_over(job: RunTime) -> str:
    return (
        f"It ran for {spell_duration(job.used)}, and max_run_time is {spell_duration(job.limit)}; "
        "submit the job again to let it go on."
    )


def _why_slow(limit: float) -> str:
    return (
        f"It ran for {spell_duration(limit)} (start_timeout) and reported no optimizer step, so it "
        "was ended; report steps, or raise start_timeout in the job file."
    )


def _why_stalled(stalled: StalledJob) -> str:
    return (
        f"Its step has been {stalled.step} for {spell_duration(stalled.seconds)} although its "
        "replicas send heartbeats, so all were ended."
    )
