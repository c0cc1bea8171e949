"""One replica as processes of this machine."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping

import psutil

from pipollux_sched.backend.base import Ended, ReplicaState, Signal
from pipollux_sched.backend.replica.replica_process import ReplicaProcess
from pipollux_sched.backend.result import ReplicaResult

from . import processes

LINGER = 1.0
"""Seconds that processes left behind by an agent have to end before they are killed."""


class LocalReplica:
    """The processes of one replica; it has ended when none of them, found by `marks`, is left."""

    def __init__(
        self,
        process: ReplicaProcess,
        result: Callable[[], ReplicaResult],
        marks: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process = process
        self._result = result
        self._marks = marks
        self._clock = clock
        self._over_at: float | None = None
        self._ended: Ended | None = None

    def state(self) -> ReplicaState:
        """Return its state; end processes that its agent has left behind."""
        handle = str(self._process.pid)
        status = self._process.poll()
        if status is None or self._ended is not None:
            return ReplicaState(handle, ended=self._ended)
        left = self._left()
        if left:
            now = self._clock()
            self._over_at = now if self._over_at is None else self._over_at
            if now >= self._over_at + LINGER:
                processes.kill(left)
            return ReplicaState(handle)
        result = self._result()
        # An agent that was stopped very early has left no result.
        self._ended = Ended(status, result._replace(asked=result.asked or self._process.asked))
        return ReplicaState(handle, ended=self._ended)

    def send(self, what: Signal) -> None:
        """Send a signal; its supervisor passes SIGTERM on once."""
        if what is Signal.STOP:
            self._process.signal(signal.SIGTERM)
        else:
            alive = [self._process.pid] if self._process.poll() is None else []
            processes.kill(processes.descendants(alive) | self._left())
            self._process.signal(signal.SIGKILL)

    def wait(self, timeout: float) -> None:
        """Wait for a supervisor started here to end, so that no zombie is left."""
        self._process.wait(timeout)

    @property
    def known(self) -> bool:
        """Whether its supervisor has written its identity."""
        return self._process.pid != 0

    def _left(self) -> set[psutil.Process]:
        wanted = self._marks.items()
        return processes.marked(lambda environment: wanted <= environment.items())
