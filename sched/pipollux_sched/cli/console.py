"""What commands have in common: exit codes, errors, and how results are printed.

Results go to standard output and nothing else does, so that they can be piped; everything said to
the person at the terminal goes to standard error.
"""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

DONE = 0
FAILED = 1
USAGE = 2

_PIPE_WIDTH = 160
"""Columns of a table that is written to a file or a pipe, which have no width of their own."""


class CommandError(Exception):
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


def output_console() -> Console:
    """Return a rich console on standard output."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, soft_wrap=False)


def complain(*sentences: str) -> None:
    """Say what is wrong, one line each, on standard error."""
    for sentence in sentences:
        typer.echo(f"Error: {sentence}", err=True)


def print_data(data: Any, output: OutputFormat) -> None:
    """Print plain data as JSON or YAML on standard output."""
    if output is OutputFormat.json:
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
    else:
        import yaml

        text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)
        typer.echo(text, nl=False)
