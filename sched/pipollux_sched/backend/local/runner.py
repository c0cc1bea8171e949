"""The parent of one replica's torchrun agent, which outlives the scheduler that started it.

    python -I -S runner.py STATUS LOG LIMIT COMMAND...

Only the parent of a process learns how it ended. So that this is not lost with a scheduler that is
killed, each agent has this small parent of its own: it says in STATUS who it is, runs COMMAND,
passes SIGTERM on, keeps LOG below LIMIT bytes (what is older goes to LOG.1), and in the end writes
the exit status of COMMAND into STATUS. It is run as a file, without the package around it, so it
costs a few milliseconds and megabytes; it must import nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

LOOK_INTERVAL = 2.0
"""Seconds between two looks at the size of the log."""
WRITE_PATIENCE = 60.0
"""Seconds for which writing the exit status is tried again, say while the disk is full."""
NO_STATUS = 74
"""Exit status where STATUS cannot be written, so that COMMAND was not started."""


def birth(pid: int) -> str | None:
    """Tell a process from every other that has, had or will have its id; None if it is not there.

    The boot and the clock ticks from the boot to its start: unlike its start by the wall clock,
    they stay the same when somebody sets the clock.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
    # Behind the name, which may contain anything; a zombie has ended.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else f"{boot}:{fields[19]}"


def write_status(path: Path, status: dict[str, Any]) -> None:
    """Write a status aside, and rename it."""
    aside = path.with_name(f".{path.name}.part")
    with aside.open("w", encoding="utf-8") as file:
        json.dump(status, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def rotate(log: Path, limit: int) -> None:
    """Move a log that has grown to `limit` bytes aside; who appends to it goes on at its new end.

    What is written between the copy and the cut is lost, at most a few lines.
    """
    with suppress(OSError):
        if log.stat().st_size >= limit:
            shutil.copyfile(log, log.with_name(log.name + ".1"))
            os.truncate(log, 0)


def run(status: Path, log: Path, limit: int, command: list[str]) -> int:
    """Run a command to its end; see the module's text."""
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
    child = subprocess.Popen(command)
    if asked:
        child.send_signal(asked[0])
    while True:
        try:
            code = child.wait(LOOK_INTERVAL)
        except subprocess.TimeoutExpired:
            rotate(log, limit)
        else:
            break
    _say_ended(status, {**known, "code": code})
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
