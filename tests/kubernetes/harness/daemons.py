"""Programs that run beside the tests: started, stopped by name, and never left behind."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.hosts.harness.hosts import runs

MARK = "PIPOLLUX_TEST_CONTROL_PLANE"
"""Environment variable that says to which test process a program belongs."""
PATIENCE = 240.0
_NUMBERS = itertools.count()


class Daemons:
    """Programs, each under a name of its own.

    They are no children of this process, as they outlast the single test. What belongs to a test
    process that is no more is ended by the next that makes such an object.

    Args:
        folder: for their logs and process ids.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._owner = f"{os.getpid()}-{psutil.Process().create_time()}-{next(_NUMBERS)}"
        self._commands: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {}
        folder.mkdir(parents=True)
        end_orphans()

    def start(self, name: str, *command: str, **environment: str) -> None:
        """Start a program.

        Args:
            name: by which it is known.
            command: the program and its arguments.
            environment: further variables.
        """
        self._commands[name] = command, environment
        script = 'echo $$ > "$0.tmp" && mv "$0.tmp" "$0" && exec "$@"'
        with (self._folder / f"{name}.log").open("ab") as log:
            subprocess.run(
                ["setsid", "--fork", "sh", "-c", script, str(self._pid_file(name)), *command],
                env={**os.environ, **environment, MARK: self._owner},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=True,
            )
        self.wait(self._pid_file(name).exists, f"{name} starts")

    def start_again(self, name: str) -> None:
        """Start a program that was stopped, as it was started before."""
        command, environment = self._commands[name]
        self.start(name, *command, **environment)

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """End a program, if it runs; kill it where it takes its time."""
        path = self._pid_file(name)
        if not path.exists():
            return
        pid = int(path.read_text())
        deadline = time.monotonic() + 10.0
        while runs(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            if time.monotonic() > deadline:
                number = signal.SIGKILL
            time.sleep(0.05)
        path.unlink()

    def is_running(self, name: str) -> bool:
        """Whether a program runs."""
        path = self._pid_file(name)
        return path.exists() and runs(int(path.read_text()))

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Return when a condition holds.

        Raises:
            AssertionError: with the ends of all logs, where it never does.
        """
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"not in {PATIENCE:g} s: {what}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        """Return the ends of all logs."""
        paths = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in paths)

    def close(self) -> None:
        """End all, in the reverse order of their start."""
        for name in reversed(list(self._commands)):
            self.stop(name)
        _kill(lambda mark: mark == self._owner)

    def _pid_file(self, name: str) -> Path:
        return self._folder / f"{name}.pid"


def end_orphans() -> None:
    """End what belongs to test processes that are no more."""
    _kill(lambda mark: not _lives(mark))


def _lives(owner: str) -> bool:
    pid, began, _ = owner.split("-")
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(int(pid)).create_time() == float(began)
    return False


def _kill(meant: Callable[[str], bool]) -> None:
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            mark = process.environ().get(MARK) if process.pid != os.getpid() else None
            if mark and meant(mark):
                process.kill()
