"""Totals of accumulators, for joining replicas: files in a folder that all replicas see.

A script that evaluates between two loops decides by the totals that it reads there. A joining
replica runs that code, too, on its way to the loop that the others are in, and knows no totals of
its own. So the replica that leads writes down what each synchronized block outside of loops showed.
"""

from __future__ import annotations

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

    def publish(self, accumulator: str, phase: str, number: int, content: bytes) -> None:
        """Write down what a block showed; where the disk does not take it, nobody can read it."""
        if self._folder is None:
            return
        path = self._path(self._folder, accumulator, phase, number)
        aside = path.with_name(f".{path.name}")
        with suppress(OSError):
            aside.write_bytes(content)
            aside.replace(path)
            self._prune(self._folder, phase, path.stat().st_mtime)

    def find(self, accumulator: str, phase: str, number: int) -> bytes | None:
        """Return what a block showed; None: nothing is known of it."""
        if self._folder is None:
            return None
        try:
            return self._path(self._folder, accumulator, phase, number).read_bytes()
        except OSError:
            return None

    @staticmethod
    def _path(folder: Path, accumulator: str, phase: str, number: int) -> Path:
        return folder / f"{TOTALS}{phase}-{number}-{accumulator}"

    @staticmethod
    def _prune(folder: Path, phase: str, now: float) -> None:
        """Remove what no joining replica can be so far behind as to read."""
        epoch = _epoch(phase)
        for path in folder.glob(f"{TOTALS}epoch*"):
            old = _epoch(path.name.removeprefix(TOTALS).partition("-")[0]) < epoch - KEPT_EPOCHS
            if old and path.stat().st_mtime < now - KEPT_SECONDS:
                path.unlink(missing_ok=True)


def _epoch(phase: str) -> int:
    number = phase.removeprefix("epoch")
    return int(number) if number.isdecimal() else 0
