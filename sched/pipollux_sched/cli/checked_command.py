"""A command that checks the values of all its options before it runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from .console import shortened
from .server_choice import check_unused_token, choose_server

MOST_CHARACTERS = 4096
"""Largest length of a text: PATH_MAX on Linux."""
MOST = 2**63 - 1
"""Largest whole number: that of a database column."""


class CheckedCommand(TyperCommand):
    """A command that refuses numbers out of range, and texts that are too long or contain NUL."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with the options of policies after that of a command with `--policy`."""
        super().format_help(ctx, formatter)
        if any("--policy" in entry.opts for entry in self.params):
            from pipollux_policies import policy_help  # slow

            formatter.write(policy_help())

    def invoke(self, ctx: Any) -> Any:
        """Check every value and the choice of scheduler, then run."""
        parameters: dict[str | None, Any] = {entry.name: entry for entry in self.params}
        for name, value in ctx.params.items():
            for one in value if isinstance(value, list | tuple) else (value,):
                problem = _problem(one)
                if problem is not None:
                    raise typer.BadParameter(problem, ctx=ctx, param=parameters.get(name))
        choose_server(ctx)
        check_unused_token(ctx)
        return super().invoke(ctx)


def _problem(value: object) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a finite number"
    if isinstance(value, int) and abs(value) > MOST:
        return f"{shortened(str(value), 40)} is out of range; give at most {MOST}"
    if isinstance(value, str | Path):
        return _problem_of_text(str(value))
    return None


def _problem_of_text(text: str) -> str | None:
    shown = repr(shortened(text, 40))
    if len(text) > MOST_CHARACTERS:
        return f"{shown} has {len(text)} characters; give at most {MOST_CHARACTERS}"
    if "\0" in text:
        return f"{shown} holds a NUL character; leave it out"
    return None
