"""The first process of a Slurm step: runs a replica's agent, and records its exit status.

    python -I -S step_main.py BASE COMMAND...

srun exits with status 0 when a node fails, and is lost with its own machine. So the exit status of
COMMAND is written to BASE.exit, in a folder that all nodes share.

If Slurm tracks processes by their parents or groups, a signal to a step reaches all of them:
SIGTERM would end the workers of a data loader whose script is about to save. So a step is stopped
with SIGURG, which only this process handles, and COMMAND alone gets SIGTERM, once. A step is killed
with SIGWINCH, so that orphans, which Slurm may not find, are killed before this process ends.
Signals do not reach a node whose slurmd is dead: the file BASE.signal, with "stop", "kill", or
"gone" (kill it, as another step replaces it), has the same effect. The module is run as a file,
without its package, and must import only the standard library.
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
"""Environment variable that identifies the processes of a step; its value is BASE."""
STOPPED = 128 + signal.SIGTERM
"""Exit status of a step that was stopped before it began."""
NO_FOLDER = 74
"""Exit status if the folder of BASE is not writable, so that COMMAND was not started."""
LINGER = 1.0
"""Seconds for remaining children of COMMAND to end before they are killed."""
LOOK_INTERVAL = 2.0
"""Polling interval of BASE.signal in seconds."""
WRITE_PATIENCE = 60.0
"""Seconds for which writing the exit status is retried."""
FULL_PATIENCE = 600.0
"""The same while the disk is full."""
EXIT_SIZE = 64
"""Size of BASE.exit in bytes, which is created at the start, without a status."""


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
    with suppress(OSError):  # a full disk may have space again at the end
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
    """Return the content of BASE.signal: "stop", "kill", "gone", or nothing."""
    try:
        return base.with_name(base.name + ".signal").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def step_processes(base: Path) -> list[int]:
    """Return all processes of this step except this one, identified by their environment."""
    mark = f"{MARK}={base}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):  # it has ended, or belongs to another user
                if mark in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return found


def kill_step(base: Path) -> None:
    """Kill all processes of this step except this one, until there are none."""
    deadline = time.monotonic() + LINGER
    while (left := step_processes(base)) and time.monotonic() < deadline:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def leave(base: Path, code: int, *, asked: bool) -> int:
    """Record an exit status, negative for a signal, for the scheduler; return that of a shell.

    Args:
        base: Prefix of the names of the step's files.
        code: The exit status.
        asked: Whether the step was asked to stop.
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
    """Return the file of the exit status."""
    return base.with_name(base.name + ".exit")


def write_end(path: Path, content: dict[str, Any]) -> None:
    """Write the result of a step; on a full disk, into the reserved space."""
    try:
        write(path, content)
    except OSError:
        with path.open("r+b", buffering=0) as file:
            file.write(json.dumps(content).ljust(EXIT_SIZE).encode())
            os.fsync(file.fileno())


def write(path: Path, content: dict[str, Any]) -> None:
    """Write JSON to a temporary file, padded to a fixed size, and rename it."""
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
    """Open a file with mode 0600; an opener for `open`."""
    return os.open(path, flags, 0o600)


def say(text: str) -> None:
    """Print a line; errors of the disk or the reader are ignored."""
    with suppress(OSError):
        os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
