"""`pipollux version`."""

from __future__ import annotations

import importlib.metadata

import typer


def version() -> None:
    """Print the version."""
    typer.echo(f"pipollux {importlib.metadata.version('pipollux')}")
