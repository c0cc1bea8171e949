"""Renting and releasing nodes, by a command of the operator, because clouds differ."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import string
import subprocess
from collections.abc import Callable, Sequence
from typing import Protocol

from pipollux_sched.errors import PipolluxError

FIELDS = ("desired", "current", "release")


class ExpanderError(PipolluxError):
    """The number of nodes could not be changed; the message is one sentence."""


class Expander(Protocol):
    """Changes the number of nodes. Renting takes minutes, so `request` need not wait for it."""

    def num_nodes(self) -> int:
        """Return how many nodes there are now."""

    def request(self, desired_nodes: int, release: Sequence[str] = ()) -> None:
        """Request a number of nodes, idempotently, or raise `ExpanderError`.

        Nothing runs any more on the nodes to `release`, and no others may be removed.
        """


class CommandExpander:
    """Runs a command of the operator with the number of nodes, without a shell.

    Args:
        command: program and arguments, quoted as in a shell; `{desired}` (required) is replaced by
            the desired number of nodes, `{current}` by the present one, `{release}` by the names of
            nodes to release, separated by commas. ValueError: it is empty, or has other fields.
        count: returns the number of nodes that the backend has.
        timeout: seconds after which the command and its child processes are killed.

    Example:
        >>> expander = CommandExpander("true --nodes {desired}", count=lambda: 3)
        >>> expander.request(5)
        >>> expander.num_nodes()
        3
    """

    def __init__(self, command: str, *, count: Callable[[], int], timeout: float = 60.0) -> None:
        self._arguments = _parse(command)
        self._command = command
        self._count = count
        if not timeout > 0:
            raise ValueError(f"timeout: {timeout} must be more than 0 seconds")
        self._timeout = timeout

    def num_nodes(self) -> int:
        """Return how many nodes there are now."""
        return self._count()

    def request(self, desired_nodes: int, release: Sequence[str] = ()) -> None:
        """Run the command; raise `ExpanderError` unless it exits with 0 in time."""
        values = {
            "desired": str(desired_nodes),
            "current": str(self.num_nodes()),
            "release": ",".join(release),
        }
        arguments = [argument.format_map(values) for argument in self._arguments]
        status, output = self._run(arguments)
        if status != 0:
            how = f"exited with {status}" if status > 0 else f"was ended by signal {-status}"
            said = f"; its last line of output: {output}" if output else ""
            raise ExpanderError(
                f"the expander command {shlex.join(arguments)!r} {how}, so the number of nodes "
                f"stays as it is{said}"
            )

    def _run(self, arguments: list[str]) -> tuple[int, str]:
        """Return the exit status and the last line of output."""
        try:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise ExpanderError(
                f"the expander command {self._command!r} cannot be started: {error}"
            ) from error
        with process:
            try:
                output, _ = process.communicate(timeout=self._timeout)
            except BaseException as error:  # leave no process running, whatever the error
                # Kill its children too: they may hold the pipe open, and would block the read.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise ExpanderError(
                    f"the expander command {shlex.join(arguments)!r} did not end within "
                    f"{self._timeout:g} s and was killed; make it return without waiting "
                    "for the nodes, or increase its timeout"
                ) from None
        lines = output.strip().splitlines()
        return process.returncode, lines[-1] if lines else ""


def _parse(command: str) -> list[str]:
    try:
        arguments = shlex.split(command)
        fields = {
            name
            for argument in arguments
            for _, name, _, _ in string.Formatter().parse(argument)
            if name is not None
        }
    except ValueError as error:
        raise ValueError(f"expander command: {command!r} cannot be read: {error}") from error
    if not fields <= set(FIELDS) or "desired" not in fields:
        named = ", ".join(f"{{{name}}}" for name in sorted(fields)) or "no field"
        raise ValueError(
            f"expander command: {command!r} names {named}; it must name {{desired}}, and may name "
            "{current} and {release} (other braces are written twice)"
        )
    return arguments
