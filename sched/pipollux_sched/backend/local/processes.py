"""The processes of a job on this machine: find and end all of them.

torchrun starts its workers in separate sessions, so killing an agent's process group leaves them
behind; and once an agent is dead its workers are no longer its children. So processes are found in
two ways: as descendants of the agents, and by variables in the environment that children inherit.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from pipollux_sched.backend.base import Ended, ReplicaState, Signal
from pipollux_sched.backend.replica.replica_process import ReplicaProcess
from pipollux_sched.backend.result import ReplicaResult, out_of_memory

from . import cgroups

LINGER = 1.0
"""Seconds that processes left behind by an agent have to end before they are killed."""


def descendants(pids: Iterable[int]) -> set[psutil.Process]:
    """Return the live processes with these ids, and all their descendants."""
    found: set[psutil.Process] = set()
    for pid in pids:
        with suppress(psutil.Error):
            root = psutil.Process(pid)
            found.update((root, *root.children(recursive=True)))
    return {process for process in found if is_alive(process)}


def marked(wanted: Callable[[Mapping[str, str]], bool]) -> set[psutil.Process]:
    """Return the live processes whose environment is `wanted`, except this one and its parents."""
    spared = {os.getpid()}
    with suppress(psutil.Error):
        spared.update(parent.pid for parent in psutil.Process().parents())
    found = set()
    for process in psutil.process_iter():
        if process.pid in spared:
            continue
        with suppress(psutil.Error, OSError):
            if wanted(process.environ()) and is_alive(process):
                found.add(process)
    return found


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process is alive and not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill processes; psutil spares those that merely reuse an id."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)


class LocalReplica:
    """The processes of one replica, found by `marks` and in its control group.

    It has ended when none of them is left, and the group is removed.
    """

    def __init__(
        self,
        process: ReplicaProcess,
        result: Callable[[], ReplicaResult],
        marks: Mapping[str, str],
        group: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process = process
        self._result = result
        self._marks = marks
        self._group = group
        self._clock = clock
        self._over_at: float | None = None
        self._ended: Ended | None = None

    @property
    def ended(self) -> Ended | None:
        """How it ended, as far as is known now."""
        return self.state().ended

    def state(self) -> ReplicaState:
        """Return its state; end processes that its agent has left behind."""
        handle = str(self._process.pid)
        status = self._process.poll()
        if status is None or self._ended is not None:
            return ReplicaState(handle, ended=self._ended)
        left = self._left()
        if left or not self._group_removed():
            now = self._clock()
            self._over_at = now if self._over_at is None else self._over_at
            if now >= self._over_at + LINGER:
                kill(left)
            return ReplicaState(handle)
        result = self._result()
        # An agent that was stopped very early has left no result.
        over = self._process.memory
        if over is not None:
            result = result._replace(error=out_of_memory(*over))
        self._ended = Ended(status, result._replace(asked=result.asked or self._process.asked))
        return ReplicaState(handle, ended=self._ended)

    def send(self, what: Signal) -> None:
        """Send a signal; its supervisor passes SIGTERM on once."""
        if what is Signal.STOP:
            self._process.signal(signal.SIGTERM)
        else:
            alive = [self._process.pid] if self._process.poll() is None else []
            kill(descendants(alive) | self._left())
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
        found = marked(lambda environment: wanted <= environment.items())
        return found if self._group is None else found | descendants(cgroups.processes(self._group))

    def _group_removed(self) -> bool:
        return self._group is None or cgroups.remove(self._group)
