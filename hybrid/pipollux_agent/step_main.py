"""The first process of a step: runs a replica's agent on its node, and leaves its exit status.

    python -I -S step_main.py BASE COMMAND...

srun ends with status 0 when a node fails, and is lost with the machine that it runs on. So the exit
status of COMMAND is written into BASE.exit, in a folder that all nodes share.

Where Slurm tracks processes by their parents or groups, a signal to a step reaches all of them:
SIGTERM would end the workers of a data loader whose script is about to save. So a step is stopped
with SIGURG, which nobody heeds but this process, and COMMAND alone gets SIGTERM, once; and it is
killed with SIGWINCH, so that orphans, which Slurm may not find, are killed before this process is
gone. A node whose slurmd is dead is not reached by signals at all: BASE.signal, which holds "stop",
"kill", or "gone" (to be killed, as another takes its place), says the same. It is run as a file,
without the package around it, and must import nothing but the standard library.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

MARK = "PIPOLLUX_STEP"
"""Environment variable by which the processes of a step are found; its value is BASE."""
STOPPED = 128 + signal.SIGTERM
"""Exit status of a step that was to stop before it began."""
NO_FOLDER = 74
"""Exit status where the folder of BASE cannot be written, so that COMMAND was not started."""
LINGER = 1.0
"""Seconds that processes which COMMAND has left behind have to end before they are killed."""
LOOK_INTERVAL = 2.0
"""Seconds between two looks for BASE.signal."""
WRITE_PATIENCE = 60.0
"""Seconds for which writing the exit status is retried."""
FULL_PATIENCE = 600.0
"""The same while the disk is full."""
EXIT_SIZE = 64
"""Bytes of BASE.exit, which is there from the beginning, without a status."""


def run(base: Path, command: list[str]) -> int:
    """Run a command to its end; see the module's docstring."""
    asked: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int = signal.SIGTERM, _frame: object = None) -> None:
        if not asked and child is not None:
            child.terminate()
        asked.append(number)

    signal.signal(signal.SIGURG, stop)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGWINCH, lambda *_: kill_step(base))
    if not os.access(base.parent, os.W_OK):
        host = os.uname().nodename
        say(f"{host} cannot write to {base.parent}, which all nodes must share")
        return NO_FOLDER
    if asked or read_signal(base):
        return leave(base, STOPPED, asked=True)
    with suppress(OSError):  # on a disk that is full already, there may be room in the end
        write(exit_file(base), {})
    child = subprocess.Popen(command, env={**os.environ, MARK: str(base)})
    if asked:
        child.terminate()
    while (code := _wait(child)) is None:
        wanted = read_signal(base)
        if wanted in ("kill", "gone"):
            kill_step(base)
        elif wanted and not asked:
            stop()
    deadline = time.monotonic() + LINGER
    while step_processes(base) and time.monotonic() < deadline:
        time.sleep(0.05)
    kill_step(base)
    return leave(base, code, asked=bool(asked))


def _wait(child: subprocess.Popen[bytes]) -> int | None:
    with suppress(subprocess.TimeoutExpired):
        return child.wait(LOOK_INTERVAL)
    return None


def read_signal(base: Path) -> str:
    """Return what the step is told: "stop", "kill", "gone", or nothing."""
    try:
        return base.with_name(base.name + ".signal").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def step_processes(base: Path) -> list[int]:
    """Return all processes of this step but this one; they are known by their environment."""
    mark = f"{MARK}={base}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):  # it has ended, or is another user's
                if mark in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return found


def kill_step(base: Path) -> None:
    """Kill all processes of this step but this one, until there are none."""
    deadline = time.monotonic() + LINGER
    while (left := step_processes(base)) and time.monotonic() < deadline:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def leave(base: Path, code: int, *, asked: bool) -> int:
    """Write an exit status, negative for a signal, where the scheduler looks for it; return it.

    Args:
        base: what the names of the step's files begin with.
        code: the exit status.
        asked: whether the step was told to stop.
    """
    path = exit_file(base)
    began = time.monotonic()
    while True:
        try:
            write_end(path, {"code": code, "asked": asked})
            break
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if time.monotonic() >= began + (FULL_PATIENCE if full else WRITE_PATIENCE):
                say(f"{path} cannot be written: {error}")
                break
            time.sleep(0.5)
    return code if code >= 0 else 128 - code


def exit_file(base: Path) -> Path:
    """Return the file for the exit status."""
    return base.with_name(base.name + ".exit")


def write_end(path: Path, content: dict[str, Any]) -> None:
    """Write how a step ended; on a full disk, into the room that was reserved for it."""
    try:
        write(path, content)
    except OSError:
        with path.open("r+b", buffering=0) as file:
            file.write(json.dumps(content).ljust(EXIT_SIZE).encode())
            os.fsync(file.fileno())


def write(path: Path, content: dict[str, Any]) -> None:
    """Write JSON to a temporary file, filled up to a fixed size, and rename it."""
    aside = path.with_name(f".{path.name}.part")
    try:
        with open(aside, "w", encoding="ascii", opener=private) as file:
            file.write(json.dumps(content).ljust(EXIT_SIZE))
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def private(path: str, flags: int) -> int:
    """Open a file that nobody else may read; an opener of `open`."""
    return os.open(path, flags, 0o600)


def say(text: str) -> None:
    """Print a line; where the disk is full, or the reader gone, do without."""
    with suppress(OSError):
        os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
