"""Slurm's commands, with timeouts or in the background, and its messages in errors."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Hashable, Mapping, Sequence

from pipollux_sched.backend.base import BackendError, ClusterUnavailableError

COMMAND_TIMEOUT = 30.0
"""Timeout in seconds; without a controller, commands fail by themselves after 9 to 18."""
_KEPT = frozenset(
    ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_WORKING_CLUSTER")
)
"""Variables that locate Slurm. All its other variables, of which an allocation has dozens, would
act as options."""
_AWAY = re.compile(
    r"Unable to contact slurm controller|Communication connection failure|Socket timed out"
    r"|Zero Bytes were transmitted|Unexpected message received|Slurm backup controller in standby"
    r"|Connection refused|slurm_persist_conn|Resource temporarily unavailable",
    re.IGNORECASE,
)
AT_ONCE = 32
"""Most concurrent commands; senders repeat their signals."""


class SlurmError(BackendError):
    """Slurm rejected a command; the message quotes its output."""


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that act as options of Slurm's commands.

    Example:
        >>> slurm_environment({"PATH": "/bin", "SLURM_NTASKS": "3", "SLURM_CONF": "/etc/s.conf"})
        {'PATH': '/bin', 'SLURM_CONF': '/etc/s.conf'}
    """
    options = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_", "SCANCEL_", "SQUEUE_", "SINFO_")
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not name.startswith(options)
    }


def controller_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that locate Slurm, for a command with a separate environment.

    Example:
        >>> controller_variables({"PATH": "/bin", "SLURM_CONF": "/etc/s.conf"})
        {'SLURM_CONF': '/etc/s.conf'}
    """
    # Not the token: the command's children would get it, too.
    names = _KEPT - {"SLURM_JWT"}
    return {name: value for name, value in environment.items() if name in names}


def is_away(words: str) -> bool:
    """Return whether Slurm's message means that its controller did not answer.

    Example:
        >>> is_away("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
        True
    """
    return _AWAY.search(words) is not None


def call(arguments: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands; raise OSError or `TimeoutExpired`."""
    return subprocess.run(
        arguments,
        env=slurm_environment(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )


def run(arguments: Sequence[str], *, timeout: float = COMMAND_TIMEOUT) -> str:
    """Run one of Slurm's commands, and return its output.

    Raises:
        ClusterUnavailableError: Slurm's controller did not answer.
        SlurmError: Slurm rejected it, or the command is not installed.
    """
    program = arguments[0]
    try:
        done = call(arguments, timeout)
    except subprocess.TimeoutExpired as error:
        raise ClusterUnavailableError(f"{program} did not end within {timeout:g} s") from error
    except OSError as error:
        raise SlurmError(
            f"{program} cannot be run ({error.strerror}); install Slurm's client commands, or add "
            "their folder to PATH"
        ) from error
    if done.returncode == 0:
        return done.stdout
    words = complaint(done.stderr) or f"{program} exited with {done.returncode}"
    if is_away(done.stderr):
        raise ClusterUnavailableError(f"Slurm does not answer: {words}")
    raise SlurmError(f"Slurm refused {program}: {words}")


def complaint(text: str) -> str:
    r"""Return the error message of a command: its last line, without the hint at its help.

    Example:
        >>> complaint("sbatch: unrecognized option '--foo'\nTry \"sbatch --help\" for more\n")
        "sbatch: unrecognized option '--foo'"
    """
    return last_line("\n".join(x for x in text.splitlines() if not x.startswith("Try ")))


def last_line(text: str) -> str:
    r"""Return the last line of a text that is not empty.

    Example:
        >>> last_line("sbatch: error: invalid partition\nsbatch: error: no job\n")
        'sbatch: error: no job'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


class SignalSender:
    """Runs `scancel` in the background, and ignores its output.

    `scancel` reports errors for signals that have arrived, and none for some that have not.
    """

    def __init__(self) -> None:
        self._under_way: dict[Hashable, subprocess.Popen[bytes]] = {}

    def send(self, what: Hashable, command: Sequence[str]) -> None:
        """Run a command, unless one for the same signal, `what`, is running.

        `ClusterUnavailableError`: it cannot be started.
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
