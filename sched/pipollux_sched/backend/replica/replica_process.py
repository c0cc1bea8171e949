"""A replica's process on this machine, started by this scheduler or an earlier one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from pipollux_agent import supervisor
from pipollux_sched.backend.base import ReplicaKey
from pipollux_sched.store import StateDir

_NAME = re.compile(r"attempt-(\d+)/replica-(\d+)\.json")
LOG_LIMIT = 64 * 2**20
"""Bytes at which a replica's log is rotated; one earlier file is kept."""


class SessionProcess:
    """A process in a separate session, started by this scheduler or an earlier one.

    Its `birth` is that of `supervisor.birth`; pid 0: unknown.
    """

    def __init__(
        self, pid: int, birth: str | None, started: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.pid = pid
        self.birth = birth
        self._started = started

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        output: Path,
        environment: Mapping[str, str],
        directory: Path | None,
    ) -> SessionProcess:
        """Start a process, which appends its output to a file, or raise OSError."""
        with open(output, "ab", opener=supervisor.private) as file:
            started = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(started.pid, supervisor.birth(started.pid), started)

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        if self._started is not None:
            return self._started.poll() is None
        return self.birth is not None and supervisor.birth(self.pid) == self.birth

    @property
    def code(self) -> int | None:
        """How a process that was started here has ended, negative for a signal; else None."""
        return None if self._started is None else self._started.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended; a process that reuses its id gets none."""
        if self._started is not None:
            with suppress(ProcessLookupError):
                self._started.send_signal(number)
        elif self.runs:
            with suppress(psutil.Error):
                psutil.Process(self.pid).send_signal(number)

    def kill(self, timeout: float) -> None:
        """Kill it and its process group; wait up to `timeout` s for one started here."""
        if self.runs:
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.wait(timeout)

    def wait(self, timeout: float) -> None:
        """Wait for a process started here to end, so that no zombie is left."""
        if self._started is not None:
            self._started.wait(timeout)


class ReplicaProcess:
    """A replica's supervisor, which writes its identity and its command's end to `status`."""

    def __init__(self, status: Path, started: SessionProcess | None = None) -> None:
        self._status = status
        if started is None:
            known = read_status(status)
            started = SessionProcess(known.get("pid", 0), known.get("birth"))
        self._process = started

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        status: Path,
        log: Path,
        environment: Mapping[str, str],
        directory: Path | None,
        memory_limit: int | None = None,
        group: Path | None = None,
    ) -> ReplicaProcess:
        """Start a replica in a separate session and a control group, or raise OSError."""
        own = [sys.executable, "-I", "-S", supervisor.__file__]
        own += [*memory_option(memory_limit, group), str(status), str(log), str(LOG_LIMIT)]
        process = SessionProcess.start(
            [*own, *command], output=log, environment=environment, directory=directory
        )
        return cls(status, process)

    @property
    def pid(self) -> int:
        """Process id of the supervisor, 0 if unknown."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return how the command ended: None while it runs, negative for a signal."""
        if self._process.runs:
            return None
        code = self._process.code
        # A supervisor without a status was killed.
        default = -signal.SIGKILL if code is None else code
        return int(read_status(self._status).get("code", default))

    @property
    def asked(self) -> bool:
        """Whether the supervisor of a command that has ended had received a stop signal."""
        return bool(read_status(self._status).get("asked"))

    @property
    def memory(self) -> tuple[int, int] | None:
        """The limit and use of memory at which the supervisor ended it; None: it did not."""
        found = read_status(self._status).get("memory")
        return None if found is None else (int(found[0]), int(found[1]))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the replica has ended; a process that reuses its id gets none."""
        self._process.signal(number)

    def wait(self, timeout: float) -> None:
        """Wait for a supervisor started here to end, so that no zombie is left."""
        self._process.wait(timeout)


def memory_option(limit: int | None, group: Path | None = None) -> list[str]:
    """Return the option of the supervisor for a limit of memory in bytes; None: there is none."""
    at = "" if group is None else f":{group}"
    return [] if limit is None else [f"--memory={limit}{at}"]


def read_status(path: Path) -> dict[str, Any]:
    """Read a supervisor's status; empty if it has written none."""
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
        return {
            "pid": int(status["pid"]),
            "birth": str(status["birth"]),
            **({"code": int(status["code"])} if "code" in status else {}),
            "asked": bool(status.get("asked")),
            **({"memory": status["memory"]} if "memory" in status else {}),
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def replicas_in(state_dir: StateDir) -> Iterator[ReplicaKey]:
    """Yield the replicas with a file ``replica-R.json`` in the folder of an attempt."""
    for path in (state_dir.path / "jobs").glob("*/attempts/attempt-*/replica-*.json"):
        match = _NAME.fullmatch(f"{path.parent.name}/{path.name}")
        if match:
            yield ReplicaKey(path.parents[2].name, int(match[1]), int(match[2]))
