"""Background signal commands: one to a dead node takes 11 s."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Hashable, Sequence

from pipollux_sched.backend.base import ClusterUnavailableError

from .commands import slurm_environment

AT_ONCE = 32
"""Most concurrent commands; senders repeat their signals."""


class SignalSender:
    """Runs `scancel` in the background, and ignores its output.

    `scancel` reports errors for signals that have arrived, and none for some that have not.
    """

    def __init__(self) -> None:
        self._under_way: dict[Hashable, subprocess.Popen[bytes]] = {}

    def send(self, what: Hashable, command: Sequence[str]) -> None:
        """Run a command, unless one for the same signal is running.

        Args:
            what: the target and the signal.
            command: program and arguments.

        Raises:
            ClusterUnavailableError: it cannot be started.
        """
        self.look()
        if what in self._under_way or len(self._under_way) >= AT_ONCE:
            return
        try:
            self._under_way[what] = subprocess.Popen(
                command,
                env=slurm_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise ClusterUnavailableError(f"{command[0]} cannot be run: {error}") from error

    def look(self) -> None:
        """Drop the commands that have ended."""
        for what, process in list(self._under_way.items()):
            if process.poll() is not None:
                del self._under_way[what]

    def close(self) -> None:
        """Kill the running commands."""
        for process in self._under_way.values():
            process.kill()
            process.wait()
        self._under_way.clear()
