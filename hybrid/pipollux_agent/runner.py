"""The parent of one replica's torchrun agent, which outlives the scheduler that started it.

    python -I -S runner.py STATUS LOG LIMIT COMMAND...

Only the parent of a process learns how it ended. So that this is not lost with a scheduler that is
killed, each agent has this small parent of its own: it writes its identity to STATUS, runs COMMAND,
passes SIGTERM on, writes what COMMAND prints into LOG (renamed to LOG.from-START when it has grown
to LIMIT bytes), and in the end writes into STATUS the exit status of COMMAND and whether it was
asked to stop. On a full disk too: STATUS has room for that from the beginning. It is run as a file,
without the package around it, so it costs a few milliseconds and megabytes; it must import nothing
but the standard library.
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
"""Bytes of a status, filled up with spaces, so that a later one has room in its place."""
RENAMED = ".from-"
"""What follows the name of a log in those of its renamed parts; see `store.log_files`."""
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
    """Write a status into the room of the previous one, which takes no space on a full disk."""
    text = json.dumps(status).ljust(STATUS_SIZE)
    with path.open("r+b", buffering=0) as file:
        file.write(text.encode())
        os.fsync(file.fileno())


def private(path: str, flags: int) -> int:
    """Open a file that nobody else may read; an opener of `open`."""
    return os.open(path, flags, 0o600)


def say(text: str) -> None:
    """Print a line; where the disk is full, or the reader gone, do without."""
    with suppress(OSError):
        os.write(1, f"{text}\n".encode())


class RotatingLog:
    """A log that is renamed to `LOG.from-START` when it reaches a size limit, and started again.

    START is the number of bytes of output before the first one in the file. The last file that was
    renamed is kept; earlier ones are removed. Bytes that a full disk cannot take are dropped, and a
    line in the log tells how many.

    Args:
        path: of the log; existing content is kept.
        limit: size in bytes.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._file = open(path, "ab", buffering=0, opener=private)  # noqa: SIM115  # until `close`
        self._start = max((start + size for start, size in self._renamed()), default=0)
        self._dropped = 0

    def write(self, data: bytes) -> None:
        """Append output; what a full disk cannot take is dropped without an error."""
        with suppress(OSError):
            if self._size() >= self._limit:
                # A file begins with a whole line, where there is one.
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
        """Append all that comes out of a pipe, until its last writer has closed it."""
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
        """Append data; return whether all of it was written, and count what was not.

        Args:
            data: what to append.
            whole: whether nothing is to be written or counted unless all of it is.
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
        """Rename the file; where another cannot be created, go on in this one."""
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
        """Return where the renamed files start, and their sizes."""
        found = self._path.parent.glob(f"{self._path.name}{RENAMED}*")
        return [(int(path.name.rpartition("-")[2]), path.stat().st_size) for path in found]


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
    copying.join(LAST_WORDS)  # processes that COMMAND has left behind may hold the pipe open
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
    """Write something, again and again where that fails; return why it cannot be written.

    Args:
        write: writes it.
        patience: seconds for which it is tried; on a full disk it is tried longer.
        give_up: when not empty, it is not tried again.
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
