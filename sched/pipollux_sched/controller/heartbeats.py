"""When each replica was last heard of.

In memory alone, on the monotonic clock: a scheduler that has just started has heard of nobody, and
must not take its own absence for the silence of others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Heard", "Heartbeats", "LostReplica", "StalledJob"]


class Heard(NamedTuple):
    """The last sign of life of a replica."""

    seconds: float
    """How long ago it was."""
    step: int | None
    """Optimizer step that the replica told then; None where it told none."""


class LostReplica(NamedTuple):
    """A replica that was heard of once, and not for some time."""

    job: str
    generation: int
    replica: int
    seconds: float
    """How long ago it was heard of last."""


class StalledJob(NamedTuple):
    """A job whose replicas were heard of, always at the same step."""

    job: str
    generation: int
    step: int
    """The highest that any replica told."""
    seconds: float
    """From the first beat that told this step to the last beat of any replica."""


@dataclass
class _Generation:
    number: int
    last: dict[int, tuple[float, int | None]] = field(default_factory=dict)
    hang_timeout: float | None = None
    highest: int | None = None
    """Step, of those told while a `hang_timeout` was."""
    grown_at: float = 0.0
    """When the highest step was told first."""

    def note_step(self, step: int | None, hang_timeout: float | None, now: float) -> None:
        self.hang_timeout = hang_timeout
        if hang_timeout is None:
            self.highest = None
        elif step is not None and (self.highest is None or step > self.highest):
            self.highest, self.grown_at = step, now

    def stalled(self, job: str) -> StalledJob | None:
        """Return the job if it hangs.

        From beat to beat, not up to now: while nobody is heard of, nobody knows the step.
        """
        if self.hang_timeout is None or self.highest is None:
            return None
        seconds = max(moment for moment, _ in self.last.values()) - self.grown_at
        if seconds < self.hang_timeout:
            return None
        return StalledJob(job, self.number, self.highest, seconds)


class Heartbeats:
    """Remembers when each replica of each job's present generation was last heard of.

    Every method may be called by any thread.

    Example:
        >>> heartbeats = Heartbeats(clock=lambda: 0.0)
        >>> heartbeats.note("char-lm", 2, 0)
        >>> heartbeats.lost(30.0)
        []

    Args:
        clock: tells the time in seconds; it must never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[str, _Generation] = {}

    def note(
        self,
        job: str,
        generation: int,
        replica: int,
        step: int | None = None,
        hang_timeout: float | None = None,
    ) -> bool:
        """Take note of a sign of life; one of an older generation than the last is left aside.

        Args:
            job: whose.
            generation: of which generation.
            replica: which pipeline replica.
            step: optimizer step that it told; None: none.
            hang_timeout: seconds for which the job's step may stay the same; None: as long as it
                likes, or the generation has not taken its first step.

        Returns:
            Whether it is the first of this replica in the present generation.
        """
        with self._lock:
            known = self._jobs.get(job)
            if known is None or known.number < generation:
                known = self._jobs[job] = _Generation(generation)
            if known.number != generation:
                return False
            first, now = replica not in known.last, self._clock()
            known.last[replica] = (now, step)
            known.note_step(step, hang_timeout, now)
            return first

    def lost(self, limit_seconds: float) -> list[LostReplica]:
        """Return the replicas that were heard of at least once, but not for `limit_seconds`."""
        with self._lock:
            now = self._clock()
            return [
                LostReplica(job, known.number, replica, now - last)
                for job, known in self._jobs.items()
                for replica, (last, _) in sorted(known.last.items())
                if now - last > limit_seconds
            ]

    def stalled(self) -> list[StalledJob]:
        """Return the jobs whose step has stayed the same for their `hang_timeout`."""
        with self._lock:
            found = (known.stalled(job) for job, known in self._jobs.items())
            return [entry for entry in found if entry is not None]

    def heard(self, job: str, generation: int) -> dict[int, Heard]:
        """Return the last sign of life of each replica of a generation that gave one."""
        with self._lock:
            known = self._jobs.get(job)
            if known is None or known.number != generation:
                return {}
            now = self._clock()
            return {
                replica: Heard(now - last, step)
                for replica, (last, step) in sorted(known.last.items())
            }

    def forget(self, job: str, generation: int) -> None:
        """Expect no more of a generation, because it has ended or is being stopped."""
        with self._lock:
            known = self._jobs.get(job)
            if known is not None and known.number == generation:
                del self._jobs[job]
