"""The command line: `app` lists the commands; each module holds one command or related ones."""

from __future__ import annotations

from .app import main

__all__ = ["main"]
