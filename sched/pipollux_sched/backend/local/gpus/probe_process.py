"""The process that reads the state of GPUs, and is given up when a call of the driver blocks."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import probe
from .state import GpuReading, GpuState

TIMEOUT = 10.0
"""Seconds that the driver may take for one GPU, or for its initialization."""
RETRY_AFTER = 300.0
"""Seconds after which a GPU that did not answer is asked again."""
MOST_STUCK = 3
"""Number of processes that even SIGKILL did not end, with which nothing is asked again that blocked
one: the driver would keep ever more of them."""
SILENT = "the driver does not answer about it"


class GpuProbe:
    """Reads the state of the GPUs; one thread at a time calls it.

    Args:
        timeout: see `TIMEOUT`.
        retry_after: see `RETRY_AFTER`.
    """

    def __init__(
        self,
        timeout: float = TIMEOUT,
        retry_after: float = RETRY_AFTER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout, self._retry_after, self._clock = timeout, retry_after, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._stuck: list[subprocess.Popen[bytes]] = []
        self._silent: dict[int, float] = {}
        """When each GPU that does not answer was last asked."""
        self._blocked = False
        """Whether the last initialization of the driver did not return."""

    def read(self) -> GpuReading:
        """Return the state of all GPUs; those that block the driver are reported as silent."""
        self._stuck = [one for one in self._stuck if one.poll() is None]
        if len(self._stuck) < MOST_STUCK:
            now = self._clock()
            self._silent = {i: at for i, at in self._silent.items() if now < at + self._retry_after}
        elif self._blocked:
            return GpuReading(
                error=f"the driver does not answer: {len(self._stuck)} processes hang in it"
            )
        while True:
            found: list[GpuState] = []
            begun: int | None = None
            try:
                for message in self._messages():
                    if "error" in message:
                        return GpuReading(error=str(message["error"]), code=message["code"])
                    if "begin" in message:
                        begun = int(message["begin"])
                    elif "gpu" in message:
                        found.append(GpuState.from_json_object(message["gpu"]))
            except TimeoutError:
                self.close()
                self._blocked = begun is None
                if begun is None:
                    return GpuReading(error=f"the driver did not answer within {self._timeout:g} s")
                self._silent[begun] = self._clock()
                continue
            except (OSError, ValueError, KeyError, TypeError) as error:
                self.close()
                why = f"the process that asks the driver has failed: {error}"
                return GpuReading(error=why, code=probe.NO_PACKAGE)
            self._blocked = False
            found += [GpuState(index=index, problem=SILENT) for index in self._silent]
            found.sort(key=lambda gpu: gpu.index)
            return GpuReading(gpus=tuple(found), silent=tuple(sorted(self._silent)))

    def close(self) -> None:
        """End the process, without waiting for one that is stuck in the driver."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._stuck.append(process)

    def _messages(self) -> Iterator[Mapping[str, Any]]:
        """Yield the messages of one reading; TimeoutError: the next one does not come."""
        process = self._running()
        assert process.stdin is not None  # noqa: S101  # a pipe
        assert process.stdout is not None  # noqa: S101  # a pipe
        process.stdin.write(json.dumps(sorted(self._silent)).encode() + b"\n")
        process.stdin.flush()
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(self._timeout):
                    raise TimeoutError
                read = os.read(process.stdout.fileno(), 1 << 16)
                if not read:
                    raise OSError(f"the process ended with status {process.wait(self._timeout)}")
                *lines, rest = (rest + read).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if "end" in message:
                        return
                    yield message
                    if "error" in message:
                        return

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(
                # -P: the folder of the program has modules that must not hide others.
                [sys.executable, "-P", str(Path(probe.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the scheduler
            )
        return self._process
