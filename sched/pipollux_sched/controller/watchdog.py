"""What happens to jobs because time passes: deadlines, lost heartbeats, training loops that stall,
old entries.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from datetime import datetime

from pipollux_sched.lifecycle import Event, Expire, HeartbeatLost, Stalled
from pipollux_sched.store import JobRecord, Store, UnknownJobError
from pipollux_sched.utils.text import spell_duration

from .heartbeats import Heartbeats, StalledJob

_LOG = logging.getLogger(__name__)

LOOK_INTERVAL = 1.0
"""Seconds between two looks."""
TIDY_INTERVAL = 5.0
"""Seconds between two times that the store is tidied."""
HEARTBEAT_TIMEOUT = 60.0
"""Seconds without a heartbeat after which a replica is taken for lost."""


class Watchdog:
    """Looks now and then whether anything is overdue, and lets it happen.

    Args:
        store: knows the jobs and their deadlines.
        heartbeats: know when each replica was last heard of.
        handle: lets an event happen to a job.
        ending: set when the scheduler ends.
        finished: tells which replicas of a job's generation have nothing left to do.
        heartbeat_timeout: seconds without a heartbeat after which a replica is taken for lost.
        tidy: called whenever the store has been tidied, for what is to be tidied besides.
    """

    def __init__(
        self,
        store: Store,
        heartbeats: Heartbeats,
        handle: Callable[[str, Event], object],
        *,
        ending: threading.Event,
        finished: Callable[[str, int], Collection[int]] = lambda _job, _generation: (),
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        tidy: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._heartbeats = heartbeats
        self._handle = handle
        self._ending = ending
        self._finished = finished
        self._heartbeat_timeout = heartbeat_timeout
        self._tidy = tidy

    def run(self) -> None:
        """Look every second, and let the store be tidied now and then, until the scheduler ends."""
        tidy_at = time.monotonic() + TIDY_INTERVAL
        while not self._ending.wait(LOOK_INTERVAL):
            try:
                self.look()
                if time.monotonic() >= tidy_at:
                    self._store.prune(time.time())
                    self._tidy()
                    tidy_at = time.monotonic() + TIDY_INTERVAL
            except Exception:  # a full disk, say, must not end the watch for ever
                if self._ending.is_set():
                    return
                _LOG.exception("the watchdog failed; it goes on in a second")

    def look(self) -> None:
        """End jobs whose deadline has passed, and generations that are lost or hang."""
        for job in self._store.overdue():
            self._let(job.name, Expire(_why_overdue(job)))
        told: set[tuple[str, int]] = set()
        for name, generation, replica, seconds in self._heartbeats.lost(self._heartbeat_timeout):
            if (name, generation) in told or replica in self._finished(name, generation):
                continue  # another one, that writes the last checkpoint say, may go on for long
            why = f"Replica {replica} was not heard of for {seconds:.0f} s, so all were ended."
            self._let(name, HeartbeatLost(generation, why))
            told.add((name, generation))
            # Not before: what could not be written down is tried again at the next look.
            self._heartbeats.forget(name, generation)
        for stalled in self._heartbeats.stalled():
            self._let(stalled.job, Stalled(stalled.generation, _why_stalled(stalled)))
            self._heartbeats.forget(stalled.job, stalled.generation)

    def _let(self, name: str, event: Event) -> None:
        try:
            self._handle(name, event)
        except UnknownJobError:
            _LOG.warning("job %s is gone", name)


def _why_overdue(job: JobRecord) -> str:
    deadline = datetime.fromtimestamp(job.deadline_at or 0.0).isoformat(" ", "seconds")
    return f"The deadline, {deadline}, has passed; submit the job again to let it go on."


def _why_stalled(stalled: StalledJob) -> str:
    return (
        f"Its step has been {stalled.step} for {spell_duration(stalled.seconds)} though its "
        "replicas give signs of life, so all were ended."
    )
