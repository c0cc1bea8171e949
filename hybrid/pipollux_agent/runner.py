"""The parent of one replica's torchrun agent, which survives the scheduler that started it.

    python -I -S runner.py STATUS LOG LIMIT COMMAND...

Only the parent of a process receives its exit status. To keep it when a scheduler is killed, each
agent has this small parent: it writes its identity to STATUS, runs COMMAND, forwards SIGTERM,
writes the output of COMMAND to LOG (renamed to LOG.from-START when it reaches LIMIT bytes), and
finally writes to STATUS the exit status of COMMAND and whether it was asked to stop. STATUS
reserves the space for that, for a full disk. The module is run as a file, without its package,
which costs a few milliseconds and megabytes; it must import only the standard library.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

LAST_WORDS = 1.0
"""Seconds for which output of COMMAND is still written after it has ended."""
WRITE_PATIENCE = 60.0
"""Seconds for which writing the exit status is retried."""
FULL_PATIENCE = 600.0
"""Seconds for which writing STATUS is retried while the disk is full."""
STATUS_SIZE = 256
"""Size of a status in bytes, padded with spaces, so that a later one fits in its place."""
RENAMED = ".from-"
"""Infix of the names of renamed parts of a log; see `store.log_files`."""
NO_STATUS = 74
"""Exit status if STATUS cannot be written, so that COMMAND was not started."""


def birth(pid: int) -> str | None:
    """Return an identity of a process that is unique despite reused ids; None: no such process.

    It consists of the boot id and the clock ticks from the boot to the process's start: unlike the
    wall-clock start time, they do not change when the clock is set.
    """
    try:
        # Thousands of processes are checked every second, and a Path costs more than the read.
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
        boot = _boot()
    except OSError:
        return None
    # The fields follow the name, which may contain any character; a zombie has ended.
    fields = stat.rpartition(b")")[2].split(maxsplit=20)
    return None if fields[0] in (b"Z", b"X") else f"{boot}:{fields[19].decode()}"


@lru_cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def write_status(path: Path, status: dict[str, Any]) -> None:
    """Write a status to a temporary file, and rename it."""
    aside = path.with_name(f".{path.name}.part")
    try:
        with open(aside, "w", encoding="utf-8", opener=private) as file:
            file.write(json.dumps(status).ljust(STATUS_SIZE))
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def overwrite_status(path: Path, status: dict[str, Any]) -> None:
    """Overwrite the previous status in place, which needs no space on a full disk."""
    text = json.dumps(status).ljust(STATUS_SIZE)
    with path.open("r+b", buffering=0) as file:
        file.write(text.encode())
        os.fsync(file.fileno())


def private(path: str, flags: int) -> int:
    """Open a file with mode 0600; an opener for `open`."""
    return os.open(path, flags, 0o600)


def say(text: str) -> None:
    """Print a line; errors of the disk or the reader are ignored."""
    with suppress(OSError):
        os.write(1, f"{text}\n".encode())


class RotatingLog:
    """A log that is renamed to `LOG.from-START` when it reaches a size limit, and started again.

    START is the number of bytes of output before the first one in the file. The last renamed file
    is kept; earlier ones are removed. Bytes that do not fit on a full disk are dropped, and a line
    in the log reports their number.

    Args:
        path: Path of the log; existing content is kept.
        limit: Size in bytes.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._file = open(path, "ab", buffering=0, opener=private)  # noqa: SIM115  # until `close`
        self._start = max((start + size for start, size in self._renamed()), default=0)
        self._dropped = 0

    def write(self, data: bytes) -> None:
        """Append output; bytes that do not fit on a full disk are dropped."""
        with suppress(OSError):
            if self._size() >= self._limit:
                # A new file begins at a line break, if there is one.
                ended = data.find(b"\n") + 1
                if ended and not self._ends_line():
                    self._append(data[:ended])
                    data = data[ended:]
                self._rotate()
        self._append(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def copy_from(self, source: int) -> None:
        """Append the content of a pipe until its last writer has closed it."""
        while data := os.read(source, 2**16):
            self.write(data)

    def _append(self, data: bytes) -> None:
        if self._dropped and data:
            lost = f"{self._dropped} bytes of output are missing here, as the disk was full"
            if not self._put(f"\n[pipollux: {lost}]\n".encode(), whole=True):
                self._dropped += len(data)
                return
            self._dropped = 0
        self._put(data)

    def _put(self, data: bytes, *, whole: bool = False) -> bool:
        """Append data; return whether all of it was written, and count dropped bytes.

        Args:
            data: The bytes.
            whole: Whether to write and count nothing unless all of it fits.
        """
        begin, done = self._size(), 0
        with suppress(OSError):
            while done < len(data):
                done += self._file.write(data[done:])
        if done == len(data):
            return True
        if whole:
            with suppress(OSError):
                self._file.truncate(begin)
        else:
            self._dropped += len(data) - done
        return False

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _ends_line(self) -> bool:
        with self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def _rotate(self) -> None:
        """Rename the file; if no new one can be created, continue with this one."""
        aside = self._path.with_name(f".{self._path.name}.part")
        new = open(aside, "ab", buffering=0, opener=private)  # noqa: SIM115  # until `close`
        before = [start for start, _ in self._renamed()]
        size = self._size()
        self._path.replace(self._named(self._start))
        aside.replace(self._path)
        self._file.close()
        self._file = new
        self._start += size
        for start in before:
            self._named(start).unlink(missing_ok=True)

    def _named(self, start: int) -> Path:
        return self._path.with_name(f"{self._path.name}{RENAMED}{start}")

    def _renamed(self) -> list[tuple[int, int]]:
        """Return the start offsets and sizes of the renamed files."""
        found = self._path.parent.glob(f"{self._path.name}{RENAMED}*")
        return [(int(path.name.rpartition("-")[2]), path.stat().st_size) for path in found]


def run(status: Path, log: Path, limit: int, command: list[str]) -> int:
    """Run a command to its end; see the module's docstring."""
    asked: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: object) -> None:
        # Once: a scheduler that adopts a replica cannot know whether its predecessor has sent the
        # signal already, and a second SIGTERM makes a script exit at once.
        if not asked and child is not None:
            child.send_signal(number)
        asked.append(number)

    signal.signal(signal.SIGTERM, pass_on)
    known: dict[str, Any] = {"pid": os.getpid(), "birth": birth(os.getpid())}
    error = _write_patiently(lambda: write_status(status, known), 0.0, give_up=asked)
    if error is not None:
        say(f"{status} cannot be written ({error}); nothing was started")
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
    copying.join(LAST_WORDS)  # remaining children of COMMAND may hold the pipe open
    ended = {**known, "code": code, "asked": bool(asked)}
    error = _write_patiently(lambda: _write_end(status, ended), WRITE_PATIENCE)
    if error is not None:
        say(f"{status} cannot be written: {error}")
    return code if code >= 0 else 128 - code


def _write_end(path: Path, status: dict[str, Any]) -> None:
    try:
        write_status(path, status)
    except OSError:
        overwrite_status(path, status)


def _write_patiently(
    write: Callable[[], None], patience: float, give_up: Sequence[int] = ()
) -> OSError | None:
    """Call a function with retries after errors; return the last error.

    Args:
        write: The function.
        patience: Seconds for which it is retried; longer on a full disk.
        give_up: It is not retried if this is not empty.
    """
    began = time.monotonic()
    while True:
        try:
            write()
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            over = time.monotonic() >= began + (FULL_PATIENCE if full else patience)
            if over or give_up:
                return error
            time.sleep(0.5)
        else:
            return None


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
