"""The processes that send notifications, and the answers that they got."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

LIMIT = 25.0
"""Seconds for one notification, with the start of the process; then the process is killed."""
IDLE = 60.0
"""Seconds after which an unused process is ended."""
_END_TIMEOUT = 5.0
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables of the scheduler that its processes get: no tokens, and no proxies."""


class Answer(NamedTuple):
    """The outcome of one attempt to send a notification."""

    error: str | None = None
    """Why it failed, without secrets; None: it was delivered."""
    final: bool = False
    """Whether another attempt would fail, too."""
    retry_after: float = 0.0
    """Seconds that the receiver asks to wait."""


class Couriers:
    """Processes that send notifications, each one at a time; safe for use by several threads.

    They are processes so that one can be killed in whatever a receiver does to it, and so that the
    code of plugins and addresses chosen by users stay out of the scheduler's own.

    Args:
        hosts: the allowed hosts, as for `HostRules.parse`.
        limit: seconds for one notification.
    """

    def __init__(self, hosts: Sequence[str], limit: float = LIMIT) -> None:
        self._hosts, self._limit = list(hosts), limit
        self._lock = threading.Lock()
        self._idle: list[tuple[float, subprocess.Popen[bytes]]] = []
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def send(self, request: Mapping[str, Any]) -> Answer:
        """Send one notification, and return the outcome."""
        try:
            process = self._take()
        except OSError as error:
            return Answer(f"no process can be started ({error.strerror})")
        if process is None:
            return Answer("the scheduler is stopping")
        line = self._ask(process, request)
        if line is None:
            self._end(process)
            return Answer("no answer in time" if not self._closed else "the scheduler is stopping")
        with self._lock:
            self._idle.append((time.monotonic(), process))
        found = json.loads(line)
        return Answer(
            found.get("error"), bool(found.get("final")), float(found.get("retry_after", 0.0))
        )

    @property
    def num_processes(self) -> int:
        """Number of processes."""
        with self._lock:
            return len(self._running)

    def tidy(self, idle: float = IDLE) -> None:
        """End the processes that were not used for a while."""
        with self._lock:
            now = time.monotonic()
            old = [process for since, process in self._idle if now - since >= idle]
            self._idle = [entry for entry in self._idle if entry[1] not in old]
        for process in old:
            self._end(process)

    def close(self) -> None:
        """End all processes, also while they send."""
        with self._lock:
            self._closed = True
            running = list(self._running)
            self._idle.clear()
        for process in running:
            self._end(process)

    def _take(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._closed:
                return None
            if self._idle:
                return self._idle.pop()[1]
            process = subprocess.Popen(
                # Neither the current folder nor compiled files: see `guard`.
                [sys.executable, "-P", "-B", "-m", "pipollux_sched.notifications.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
                cwd="/",
                # Ctrl-C ends the scheduler, which ends this process.
                start_new_session=True,
            )
            self._running.add(process)
        self._write(process, {"hosts": self._hosts})
        return process

    def _ask(self, process: subprocess.Popen[bytes], request: Mapping[str, Any]) -> bytes | None:
        """Return the process's answer; None: it has ended, or has none in time."""
        deadline, read = time.monotonic() + self._limit, b""
        try:
            assert process.stdout is not None  # noqa: S101  # it is a pipe
            if not self._write(process, request):
                return None
            while not read.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                    return None
                part = os.read(process.stdout.fileno(), 65536)
                if not part:
                    return None
                read += part
        except (OSError, ValueError):  # `close` has ended it
            return None
        return read

    def _write(self, process: subprocess.Popen[bytes], message: Mapping[str, Any]) -> bool:
        try:
            assert process.stdin is not None  # noqa: S101  # it is a pipe
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
        except (OSError, ValueError):
            return False
        return True

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if process not in self._running:
                return
            self._running.discard(process)
        process.kill()
        process.wait(_END_TIMEOUT)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
