"""The last heartbeat of each replica.

Losses are detected here, in memory, on a clock that runs only while the scheduler answers requests:
its own downtime must not count as silence of replicas. The store's copy
(`Heartbeats.take_changed`) lets the next scheduler know which replicas to expect.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pipollux_sched.store import KeptHeartbeat, ReceivedHeartbeat


class LostReplica(NamedTuple):
    """A replica whose heartbeats have stopped."""

    job: str
    attempt: int
    replica: int
    seconds: float
    """Seconds since its last heartbeat."""


class StalledJob(NamedTuple):
    """A job whose replicas send heartbeats without progress of the step."""

    job: str
    attempt: int
    step: int
    """The highest step that any replica reported."""
    seconds: float
    """From the first heartbeat at this step to the last heartbeat of any replica."""


@dataclass
class _Attempt:
    number: int
    last: dict[int, tuple[float, int | None]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    hang_timeout: float | None = None
    highest: int | None = None
    """Highest step that was reported together with a `hang_timeout`."""
    grown_at: float = 0.0

    def note_step(self, step: int | None, hang_timeout: float | None, now: float) -> None:
        self.hang_timeout = hang_timeout
        if hang_timeout is None:
            self.highest = None
        elif step is not None and (self.highest is None or step > self.highest):
            self.highest, self.grown_at = step, now

    def stalled(self, job: str) -> StalledJob | None:
        """Return the job if it has stalled; only time between heartbeats counts."""
        if self.hang_timeout is None or self.highest is None or not self.last:
            return None
        seconds = max(moment for moment, _ in self.last.values()) - self.grown_at
        if seconds < self.hang_timeout:
            return None
        return StalledJob(job, self.number, self.highest, seconds)


class Heartbeats:
    """The last heartbeat of each replica of each job's present attempt; safe for any thread.

    Example:
        >>> heartbeats = Heartbeats(clock=lambda: 0.0)
        >>> heartbeats.note("char-lm", 2, 0)
        True
        >>> heartbeats.lost(30.0)
        []
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[str, _Attempt] = {}

    def note(
        self,
        job: str,
        attempt: int,
        replica: int,
        step: int | None = None,
        hang_timeout: float | None = None,
        *,
        finished: bool = False,
    ) -> bool:
        """Record a heartbeat; return whether it is the replica's first in the present attempt.

        One of an older attempt is ignored. The step may stay the same for `hang_timeout` seconds;
        None: no limit, or the attempt has not taken its first step. A `finished` replica is never
        lost.
        """
        with self._lock:
            known = self._jobs.get(job)
            if known is None or known.number < attempt:
                known = self._jobs[job] = _Attempt(attempt)
            if known.number != attempt:
                return False
            first, now = replica not in known.last, self._clock()
            known.last[replica] = (now, step)
            known.changed.add(replica)
            if finished:
                known.finished.add(replica)
            known.note_step(step, hang_timeout, now)
            return first

    def expect(self, job: str, attempt: int, replica: int, kept: KeptHeartbeat) -> None:
        """Expect heartbeats of a replica that an earlier scheduler knew, unless it sent one."""
        with self._lock:
            known = self._jobs.setdefault(job, _Attempt(attempt))
            if known.number == attempt:
                known.last.setdefault(replica, (self._clock(), kept.step))
                if kept.finished:
                    known.finished.add(replica)

    def take_changed(self) -> list[ReceivedHeartbeat]:
        """Return the last heartbeat of each replica with a heartbeat since the last call."""
        with self._lock:
            now, found = self._clock(), []
            for job, known in self._jobs.items():
                for replica in sorted(known.changed):
                    last, step = known.last[replica]
                    finished = replica in known.finished
                    found.append(
                        ReceivedHeartbeat(job, known.number, replica, step, finished, now - last)
                    )
                known.changed.clear()
            return found

    def lost(self, limit_seconds: float) -> list[LostReplica]:
        """Return the unfinished replicas with a heartbeat, but none in the last `limit_seconds`."""
        with self._lock:
            now = self._clock()
            return [
                LostReplica(job, known.number, replica, now - last)
                for job, known in self._jobs.items()
                for replica, (last, _) in sorted(known.last.items())
                if now - last > limit_seconds and replica not in known.finished
            ]

    def lingering(self, limit_seconds: float) -> list[tuple[str, int]]:
        """Return attempts whose scripts ended that long ago, but whose processes have not."""
        with self._lock:
            now = self._clock()
            return [
                (job, known.number)
                for job, known in self._jobs.items()
                if known.last
                and known.finished >= known.last.keys()
                and now - max(moment for moment, _ in known.last.values()) > limit_seconds
            ]

    def stalled(self) -> list[StalledJob]:
        """Return the jobs whose step has stayed the same for their `hang_timeout`."""
        with self._lock:
            found = (known.stalled(job) for job, known in self._jobs.items())
            return [entry for entry in found if entry is not None]

    def heard(self, job: str, attempt: int) -> dict[int, KeptHeartbeat]:
        """Return the last heartbeat of each replica of an attempt that sent one."""
        with self._lock:
            known = self._jobs.get(job)
            if known is None or known.number != attempt:
                return {}
            now = self._clock()
            return {
                replica: KeptHeartbeat(now - last, step, replica in known.finished)
                for replica, (last, step) in sorted(known.last.items())
            }

    def forget(self, job: str, attempt: int, replica: int | None = None) -> None:
        """Expect no more heartbeats of an attempt, or of one replica."""
        with self._lock:
            known = self._jobs.get(job)
            if known is None or known.number != attempt:
                return
            if replica is None:
                del self._jobs[job]
            else:
                known.last.pop(replica, None)
                known.changed.discard(replica)
