"""A program that answers requests in a process of its own, as its calls may block or end it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipollux_agent.supervisor import private

LOG_LIMIT = 2**20
"""Bytes above which the output of earlier processes is removed."""


class ClientProcess:
    """Starts a program for the first request, and again once it has ended.

    Requests and answers are lines of JSON, on its standard input and output. The program must end
    when its input does: then this process has ended. No call waits longer than its timeout; after
    an error, `close` it.

    Args:
        program: a Python file, which is run without its package.
        log: where its other output goes; None: nowhere.
        kill_patience: seconds that it has to end after a kill; later, it is stuck in the kernel.
    """

    def __init__(
        self,
        program: Path,
        *arguments: str,
        log: Path | None = None,
        kill_patience: float = 30.0,
    ) -> None:
        # -P: the folder of the program has modules that must not hide others.
        self._command = [sys.executable, "-P", str(program), *arguments]
        self._log, self._kill_patience = log, kill_patience
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    @property
    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def send(self, request: Any, timeout: float) -> None:
        """Send a request; `TimeoutError`: it is not read; OSError: the process has ended."""
        if not self.runs:
            self.close()
            self._process = self._start()
        assert self._process is not None  # noqa: S101  # it was started
        assert self._process.stdin is not None  # noqa: S101  # a pipe
        descriptor = self._process.stdin.fileno()
        left = json.dumps(request).encode() + b"\n"
        while left:
            if not _is_ready(descriptor, select.POLLOUT, timeout):
                raise TimeoutError(f"it has read nothing for {timeout:g} s")
            left = left[os.write(descriptor, left) :]

    def receive(self, timeout: float) -> Any:
        """Return the next answer.

        Raises:
            TimeoutError: it does not come.
            OSError: the process has ended.
            ValueError: it is no JSON.
        """
        if self._process is None or self._process.stdout is None:
            raise OSError("the process has ended")
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            if not _is_ready(descriptor, select.POLLIN, timeout):
                raise TimeoutError(f"it has not answered for {timeout:g} s")
            read = os.read(descriptor, 1 << 16)
            if not read:
                raise OSError(f"the process ended with status {self._process.wait(timeout)}")
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def close(self, patience: float = 0.0) -> subprocess.Popen[bytes] | None:
        """End it, by a kill after `patience` seconds; return it if it is stuck nevertheless."""
        process, self._process, self._rest = self._process, None, b""
        if process is None or process.stdin is None or process.stdout is None:
            return None
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        process.kill()
        process.stdout.close()
        try:
            process.wait(self._kill_patience)
        except subprocess.TimeoutExpired:
            return process
        return None

    def _start(self) -> subprocess.Popen[bytes]:
        path = self._log or Path(os.devnull)
        is_large = path.exists() and path.stat().st_size > LOG_LIMIT
        with open(path, "wb" if is_large else "ab", opener=private) as log:
            process = subprocess.Popen(
                self._command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the scheduler
            )
        assert process.stdin is not None  # noqa: S101  # a pipe
        os.set_blocking(process.stdin.fileno(), False)
        return process


def _is_ready(descriptor: int, event: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(timeout * 1000))
