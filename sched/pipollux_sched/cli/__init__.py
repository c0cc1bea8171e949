"""The command line: `app` lists the commands, each group of them is a module of its own."""

from __future__ import annotations

from .app import main

__all__ = ["main"]
