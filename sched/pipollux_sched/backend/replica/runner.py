"""The parent of one replica's torchrun agent, which outlives the scheduler that started it.

    python -I -S runner.py STATUS LOG LIMIT COMMAND...

Only the parent of a process learns how it ended. So that this is not lost with a scheduler that is
killed, each agent has this small parent of its own: it writes its identity to STATUS, runs COMMAND,
passes SIGTERM on, writes what COMMAND prints into LOG (renamed to LOG.1 when it has grown to LIMIT
bytes), and in the end writes into STATUS the exit status of COMMAND and whether it was asked to
stop. It is run as a file, without
the package around it, so it costs a few milliseconds and megabytes; it must import nothing but the
standard library.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

LAST_WORDS = 1.0
"""Seconds for which output of COMMAND is still written after it has ended."""
WRITE_PATIENCE = 60.0
"""Seconds for which writing the exit status is retried, for instance while the disk is full."""
NO_STATUS = 74
"""Exit status if STATUS cannot be written, so that COMMAND was not started."""


def birth(pid: int) -> str | None:
    """Return what identifies a process among all that ever have its id; None if it does not exist.

    The boot and the clock ticks from the boot to its start: unlike its start by the wall clock,
    they stay the same when the clock is set.
    """
    try:
        # Thousands of processes are looked at every second, and a Path takes longer than the file.
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
        boot = _boot()
    except OSError:
        return None
    # After the name, which may contain anything; a zombie has ended.
    fields = stat.rpartition(b")")[2].split(maxsplit=20)
    return None if fields[0] in (b"Z", b"X") else f"{boot}:{fields[19].decode()}"


@lru_cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def write_status(path: Path, status: dict[str, Any]) -> None:
    """Write a status to a temporary file, and rename it."""
    aside = path.with_name(f".{path.name}.part")
    with aside.open("w", encoding="utf-8") as file:
        json.dump(status, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


class RotatingLog:
    """A log that is renamed to `LOG.1` when it reaches a size limit, and started again.

    Args:
        path: of the log; existing content is kept.
        limit: size in bytes.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._file = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Append output; what a full disk cannot take is dropped without an error."""
        with suppress(OSError):
            if self._file.tell() >= self._limit:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._file.close()
                self._file = self._path.open("ab", buffering=0)
            self._file.write(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def copy_from(self, source: int) -> None:
        """Append all that comes out of a pipe, until its last writer has closed it."""
        while data := os.read(source, 2**16):
            self.write(data)


def run(status: Path, log: Path, limit: int, command: list[str]) -> int:
    """Run a command to its end; see the module's docstring."""
    asked: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: object) -> None:
        # Once: a scheduler that adopts a replica cannot know whether the one before has asked it to
        # stop, and a second SIGTERM makes a script exit at once.
        if not asked and child is not None:
            child.send_signal(number)
        asked.append(number)

    signal.signal(signal.SIGTERM, pass_on)
    known: dict[str, Any] = {"pid": os.getpid(), "birth": birth(os.getpid())}
    try:
        write_status(status, known)
    except OSError as error:
        print(f"{status} cannot be written ({error}); nothing was started", flush=True)
        return NO_STATUS
    printed, printing = os.pipe()
    child = subprocess.Popen(command, stdout=printing, stderr=printing)
    os.close(printing)
    if asked:
        child.send_signal(asked[0])
    copy = RotatingLog(log, limit).copy_from
    copying = threading.Thread(target=copy, args=(printed,), daemon=True)
    copying.start()
    code = child.wait()
    copying.join(LAST_WORDS)  # processes that COMMAND has left behind may hold the pipe open
    _say_ended(status, {**known, "code": code, "asked": bool(asked)})
    return code if code >= 0 else 128 - code


def _say_ended(path: Path, status: dict[str, Any]) -> None:
    deadline = time.monotonic() + WRITE_PATIENCE
    while True:
        try:
            write_status(path, status)
        except OSError as error:
            if time.monotonic() >= deadline:
                print(f"{path} cannot be written: {error}", flush=True)
                return
            time.sleep(0.5)
        else:
            return


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
