"""`pipollux version`."""

from __future__ import annotations

import importlib.metadata

import typer

from .console import TextFormat, print_data
from .options import TextOutput


def version(output: TextOutput = TextFormat.text) -> None:
    """Print the version."""
    found = importlib.metadata.version("pipollux")
    if output is TextFormat.text:
        typer.echo(f"pipollux {found}")
    else:
        print_data({"version": found}, output)
