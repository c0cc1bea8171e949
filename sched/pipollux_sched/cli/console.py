"""Exit codes, errors and output; standard output carries only results, so it can be piped."""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import typer

from pipollux_sched.errors import PipolluxError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

DONE = 0
FAILED = 1
USAGE = 2

OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)
"""Errors of writing to standard output; writing a file reports its own errors."""
MOST_SAID = 2000
"""Largest length of an error message, which may quote a user's input."""
_PIPE_WIDTH = 160
"""Width of a table that is written to a file or a pipe."""


class CommandError(PipolluxError):
    """Ends a command with one clear sentence on standard error, and `FAILED` or `USAGE`."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class OutputFormat(StrEnum):
    """Output formats of a command whose result is a table."""

    table = "table"
    json = "json"
    yaml = "yaml"


class TextFormat(StrEnum):
    """Output formats of a command whose result is text."""

    text = "text"
    json = "json"
    yaml = "yaml"


class LineFormat(StrEnum):
    """Output formats of a command that prints line by line; JSON is one object per line."""

    text = "text"
    json = "json"


def use_any_output() -> None:
    """Prepare the standard streams for any locale and for closed descriptors.

    Characters that the locale's encoding lacks are replaced. A closed stream discards its output
    and keeps its descriptor, which the next opened file would get otherwise.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_WRONLY)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115  # kept open
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def discard_output() -> None:
    """Discard the buffered output of standard output after a failed write."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def output_console() -> Console:
    """Return a rich console on standard output."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, soft_wrap=False)


def print_result(result: RenderableType, *, fold: bool = True) -> None:
    """Print a result on standard output; strip trailing blanks unless it is a terminal."""
    console = output_console()
    if console.is_terminal:
        console.print(result, soft_wrap=not fold)
        return
    with console.capture() as capture:
        console.print(result, soft_wrap=not fold)
    for line in capture.get().splitlines():
        typer.echo(line.rstrip())


def complain(*sentences: str) -> None:
    """Print errors on standard error, one per line; shorten very long ones."""
    for sentence in sentences:
        typer.echo(f"Error: {shortened(sentence, MOST_SAID)}", err=True)


def warn(sentence: str) -> None:
    """Print a warning on standard error."""
    typer.echo(f"Warning: {shortened(sentence, MOST_SAID)}", err=True)


def shortened(text: str, most: int) -> str:
    """Return a text of at most `most` characters, with its middle left out if it is longer.

    Example:
        >>> shortened("abcdefghijklmnopqrstuvwxyz", 11)
        'abcd...wxyz'
    """
    if len(text) <= most:
        return text
    part = (most - 3) // 2
    return f"{text[:part]}...{text[-part:]}"


def print_json_line(data: Any) -> None:
    """Print plain data as JSON on one line of standard output, and flush it."""
    typer.echo(json.dumps(data, ensure_ascii=False))


def print_data(data: Any, output: OutputFormat | TextFormat | LineFormat) -> None:
    """Print plain data as JSON or YAML on standard output."""
    if output.value == "json":
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
    else:
        import yaml

        simple = json.loads(json.dumps(data))  # YAML does not write enumerations as strings
        text = yaml.safe_dump(simple, sort_keys=False, allow_unicode=True, width=100)
        typer.echo(text, nl=False)


@contextmanager
def libraries_on_stderr() -> Iterator[None]:
    """Redirect the output of C libraries (HiGHS), child processes and `print` to standard error."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # there is no standard output, so nothing to keep clean
        yield
        return
    try:
        with suppress(OSError):  # there is no standard error either
            os.dup2(2, 1)
        yield
    finally:
        # C buffers its output; it must be flushed before the streams are restored.
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
