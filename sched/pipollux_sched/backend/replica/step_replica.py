"""A replica below `supervisor --step`: its files and signals in a folder that nodes share."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar

from pipollux_agent import supervisor
from pipollux_sched.backend.base import Ended, ReplicaKey, Signal
from pipollux_sched.store import StateDir

from .replica_process import replicas_in
from .step_files import StepFiles, step_name

EXIT_PATIENCE = 6.0
"""Seconds until an exit status written on a node is visible here, and for the end of processes that
the cluster no longer reaches: see `GONE`."""
KILL_PATIENCE = 5.0
"""Seconds for the first process of a replica to kill the others, before the cluster kills all."""
GONE = "gone"
"""Signal to a replica, by a file alone, whose node the cluster has lost: its processes may still
run, for example if only the cluster's own daemon is dead, while others replace them."""

T = TypeVar("T")


class StepReplica:
    """A replica that was started here or by an earlier scheduler, until it is forgotten.

    A signal is the content of a file, which its supervisor reads, also on a node that the cluster
    does not reach. A stop does not follow on a kill.
    """

    kind: type[StepFiles] = StepFiles
    """Its files."""

    def __init__(self, key: ReplicaKey, state_dir: StateDir) -> None:
        self.key, self.name = key, step_name(key)
        self.ended: Ended | None = None
        self._files, self._log = self.kind.of(state_dir, key), state_dir.log(*key)
        self._told = self._written = self._files.read_signal()
        self._told_at: float | None = time.monotonic() if self._told else None
        self._over_at: float | None = None

    def _prepare_files(self) -> None:
        """Create the files, without those of an earlier start, or raise OSError."""
        for folder in (self._log.parent, self._files.base.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._files.remove()
        self._files.prepare_signal()
        self._told, self._written, self._told_at = "", "", None
        with open(self._log, "ab", opener=supervisor.private):
            pass  # created here, for readers; written on the node

    def _tell(self, what: str) -> None:
        """Write a signal; if that fails, it is written with the next one."""
        if self._told not in (Signal.KILL.value, GONE, what):
            self._told, self._told_at = what, time.monotonic()
        if self._written != self._told:
            with suppress(OSError):  # the caller repeats the signal
                self._files.write_signal(self._told)
                self._written = self._told

    def _is_late(self) -> bool:
        """Return whether its exit status would have arrived since this was asked first."""
        self._over_at = self._over_at or time.monotonic()
        return time.monotonic() >= self._over_at + EXIT_PATIENCE


def end_in_files(files: StepFiles, gone: str, stopped: str) -> Ended | None:
    """Return how a replica ended whose processes are over; None: its files do not tell.

    `gone` tells why the cluster has lost it, or is empty; `stopped` that somebody else has stopped
    it, if so.
    """
    status, result, told = files.read_exit(), files.read_result(), files.read_signal()
    if status == 0:
        return Ended(0, result)
    if gone:
        return Ended(status, result, gone)
    if status is not None:
        return Ended(status, result, stopped if result.asked and not told else "")
    return Ended(-signal.SIGKILL, result) if told == Signal.KILL.value else None


def find_records(state_dir: StateDir, kind: type[T]) -> Iterator[tuple[ReplicaKey, T]]:
    """Yield the replicas that this scheduler or an earlier one has started and not forgotten."""
    for key in replicas_in(state_dir):
        record = StepFiles.of(state_dir, key).read_record(kind)
        if record is not None:
            yield key, record
