"""What commands have in common: exit codes, errors, and how results are printed.

Results go to standard output and nothing else does, so that they can be piped; everything said to
the person at the terminal goes to standard error.
"""

from __future__ import annotations

import ctypes
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

MOST_SAID = 2000
"""Characters of a complaint; what a user gave may stand in it."""
_PIPE_WIDTH = 160
"""Columns of a table that is written to a file or a pipe, which have no width of their own."""


class CommandError(PipolluxError):
    """Ends a command with one clear sentence on standard error.

    Args:
        message: the sentence.
        exit_code: `FAILED`, or `USAGE` if the command line or a file is at fault.
    """

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class OutputFormat(StrEnum):
    """How a command prints its result."""

    table = "table"
    json = "json"
    yaml = "yaml"


class TextFormat(StrEnum):
    """How a command prints a result that people read as text."""

    text = "text"
    json = "json"
    yaml = "yaml"


class LineFormat(StrEnum):
    """How a command prints what it tells line by line; as JSON, an object a line."""

    text = "text"
    json = "json"


def output_console() -> Console:
    """Return a rich console on standard output."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, soft_wrap=False)


def print_result(result: RenderableType, *, fold: bool = True) -> None:
    """Print a result on standard output; into a pipe without the blanks that fill up its lines.

    Args:
        result: whatever rich can show.
        fold: break lines that are wider than the terminal; False leaves that to the terminal.
    """
    console = output_console()
    if console.is_terminal:
        console.print(result, soft_wrap=not fold)
        return
    with console.capture() as capture:
        console.print(result, soft_wrap=not fold)
    for line in capture.get().splitlines():
        typer.echo(line.rstrip())


def complain(*sentences: str) -> None:
    """Say what is wrong, one line each, on standard error; a very long one without its middle."""
    for sentence in sentences:
        typer.echo(f"Error: {shortened(sentence, MOST_SAID)}", err=True)


def shortened(text: str, most: int) -> str:
    """Return a text, without its middle where it is longer than `most` characters.

    Example:
        >>> shortened("abcdefghijklmnopqrstuvwxyz", 11)
        'abcd...wxyz'
    """
    if len(text) <= most:
        return text
    part = (most - 3) // 2
    return f"{text[:part]}...{text[-part:]}"


def print_json_line(data: Any) -> None:
    """Print plain data as JSON on one line of standard output, at once."""
    typer.echo(json.dumps(data, ensure_ascii=False))


def print_data(data: Any, output: OutputFormat | TextFormat | LineFormat) -> None:
    """Print plain data as JSON or YAML on standard output."""
    if output.value == "json":
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
    else:
        import yaml

        simple = json.loads(json.dumps(data))  # YAML would not take enumerations for texts
        text = yaml.safe_dump(simple, sort_keys=False, allow_unicode=True, width=100)
        typer.echo(text, nl=False)


@contextmanager
def libraries_on_stderr() -> Iterator[None]:
    """Send to standard error what is written past Python (HiGHS does), also by processes started.

    Python's own `print` goes there, too, so results are printed afterwards.
    """
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
        # C keeps lines back until its buffer is full; they must not come out behind this.
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
