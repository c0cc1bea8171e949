"""Totals of accumulators, published for joining replicas in a folder that all replicas share.

A script that evaluates between two loops makes decisions based on totals. A joining replica runs
that code, too, and has no totals. So the leader writes the totals of each synchronized block
outside of loops to a file.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

__all__ = ["TOTALS", "PublishedTotals"]

TOTALS = "totals-"
KEPT_EPOCHS = 8
"""Epochs for which files are kept whatever their age; a joining replica is a little behind."""
KEPT_SECONDS = 600.0
"""Seconds for which older files are kept."""


class PublishedTotals:
    """Totals of synchronized blocks; nothing is published without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._written: dict[str, bytes] = {}
        """Contents that this replica has written and not removed, by file name."""

    def publish(self, accumulator: str, phase: str, number: int, content: bytes) -> None:
        """Write the totals of a block; errors of the storage are ignored."""
        if self._folder is None:
            return
        with self._lock:
            name = _name(accumulator, phase, number)
            if self._written.get(name) != content:
                self._written[name] = content
                _write(self._folder / name, content)
                self._prune(self._folder, phase)

    def restore(self) -> None:
        """Rewrite files that have disappeared, perhaps with the folder."""
        if self._folder is None:
            return
        with self._lock:
            found = set(os.listdir(self._folder)) if self._written else set()
            for name, content in self._written.items():
                if name not in found:
                    _write(self._folder / name, content)

    def find(self, accumulator: str, phase: str, number: int) -> bytes | None:
        """Return the totals of a block; None: they are not published."""
        if self._folder is None:
            return None
        try:
            return (self._folder / _name(accumulator, phase, number)).read_bytes()
        except OSError:
            return None

    def _prune(self, folder: Path, phase: str) -> None:
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
