"""The process that reads the state of GPUs, and is given up when a call of the driver blocks."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipollux_sched.backend.client_process import ClientProcess

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
        self._process = ClientProcess(Path(probe.__file__), kill_patience=1.0)
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
        stuck = self._process.close()
        if stuck is not None:
            self._stuck.append(stuck)

    def _messages(self) -> Iterator[Mapping[str, Any]]:
        """Yield the messages of one reading; TimeoutError: the next one does not come."""
        self._process.send(sorted(self._silent), self._timeout)
        while True:
            message = self._process.receive(self._timeout)
            if "end" in message:
                return
            yield message
            if "error" in message:
                return
