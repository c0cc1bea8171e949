"""Totals of accumulators, for joining replicas: files in a folder that all replicas see.

A script that evaluates between two loops decides by the totals that it reads there. A joining
replica runs that code, too, on its way to the loop that the others are in, and knows no totals of
its own. So the replica that leads writes down what each synchronized block outside of loops showed.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

__all__ = ["TOTALS", "PublishedTotals"]

TOTALS = "totals-"
"""Begins the names of the files."""
KEPT_EPOCHS = 8
"""Epochs for which they are kept whatever their age; a joining replica is a little behind."""
KEPT_SECONDS = 600.0
"""Seconds for which older ones are kept."""


class PublishedTotals:
    """What synchronized blocks showed, by accumulator, phase of the script and number therein.

    Args:
        folder: That all replicas see; None: there is none, and nothing is published.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._written: dict[str, bytes] = {}
        """What this replica has written and not removed, by name of the file."""

    def publish(self, accumulator: str, phase: str, number: int, content: bytes) -> None:
        """Write down what a block showed; where the disk does not take it, nobody can read it."""
        if self._folder is None:
            return
        with self._lock:
            name = _name(accumulator, phase, number)
            if self._written.get(name) != content:
                self._written[name] = content
                _write(self._folder / name, content)
                self._prune(self._folder, phase)

    def restore(self) -> None:
        """Write once more what has disappeared meanwhile, with the folder perhaps."""
        if self._folder is None:
            return
        with self._lock:
            found = set(os.listdir(self._folder)) if self._written else set()
            for name, content in self._written.items():
                if name not in found:
                    _write(self._folder / name, content)

    def find(self, accumulator: str, phase: str, number: int) -> bytes | None:
        """Return what a block showed; None: nothing is known of it."""
        if self._folder is None:
            return None
        try:
            return (self._folder / _name(accumulator, phase, number)).read_bytes()
        except OSError:
            return None

    def _prune(self, folder: Path, phase: str) -> None:
        """Remove what no joining replica can be so far behind as to read."""
        with suppress(OSError):
            now = (folder / next(reversed(self._written))).stat().st_mtime  # by the storage's clock
            for path in folder.glob(f"{TOTALS}epoch*"):
                old = _epoch(_phase(path.name)) < _epoch(phase) - KEPT_EPOCHS
                if old and path.stat().st_mtime < now - KEPT_SECONDS:
                    self._written.pop(path.name, None)
                    path.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    aside = path.with_name(f".{path.name}")
    with suppress(OSError):
        aside.write_bytes(content)
        aside.replace(path)


def _name(accumulator: str, phase: str, number: int) -> str:
    return f"{TOTALS}{phase}-{number}-{accumulator}"


def _phase(name: str) -> str:
    return name.removeprefix(TOTALS).partition("-")[0]


def _epoch(phase: str) -> int:
    number = phase.removeprefix("epoch")
    return int(number) if number.isdecimal() else 0
