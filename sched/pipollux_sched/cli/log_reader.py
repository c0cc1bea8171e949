"""Reading the logs of a job's replicas, also while they are written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pipollux_sched.store import StateDir

_CHUNK = 2**20


class LogLine(NamedTuple):
    """One line that a replica wrote."""

    generation: int
    replica: int
    line: str
    several: bool
    """Whether there is more than one log, so that a reader has to be told which it is from."""

    @property
    def prefixed(self) -> str:
        """The line, told apart from those of other logs where there are any."""
        return f"[{self.generation}.{self.replica}] {self.line}" if self.several else self.line

    def to_dict(self) -> dict[str, int | str]:
        """Return it as plain data."""
        return {"generation": self.generation, "replica": self.replica, "line": self.line}


class LogReader:
    """Reads whole lines of a job's logs, each line once.

    Where there is more than one log, each line begins with the generation and replica it is from.

    Args:
        state_dir: where the logs are.
        job: whose.
        generation: which one; None: the last one there is, and those that come after.
        replica: which pipeline replica; None: all.
    """

    def __init__(
        self, state_dir: StateDir, job: str, generation: int | None, replica: int | None
    ) -> None:
        self._state_dir = state_dir
        self._job = job
        self._generation = generation
        self._replica = replica
        self._first: int | None = None
        self._offsets: dict[Path, int] = {}
        self._begun: dict[Path, bytes] = {}

    @property
    def found(self) -> bool:
        """Whether there was any log to read."""
        return bool(self._offsets)

    def read(self) -> Iterator[LogLine]:
        """Return the lines that were finished since the last call."""
        logs = self._logs()
        several = len(self._offsets) > 1 or len(logs) > 1
        for generation, replica, path in logs:
            for line in self._new_lines(path):
                yield LogLine(generation, replica, line, several)

    def rest(self) -> Iterator[LogLine]:
        """Return what stands behind the last line break of each log."""
        for generation, replica, path in self._logs():
            begun = self._begun.get(path)
            if begun:
                self._begun[path] = b""
                several = len(self._offsets) > 1
                yield LogLine(generation, replica, begun.decode("utf-8", "replace"), several)

    def _logs(self) -> list[tuple[int, int, Path]]:
        found = self._state_dir.logs(self._job)
        if self._generation is not None:
            found = [entry for entry in found if entry[0] == self._generation]
        elif found:
            self._first = self._first or found[-1][0]
            found = [entry for entry in found if entry[0] >= self._first]
        return [entry for entry in found if self._replica in (None, entry[1])]

    def _new_lines(self, path: Path) -> Iterator[str]:
        offset = self._offsets.setdefault(path, 0)
        if path.stat().st_size < offset:  # it was moved aside, and is written from its beginning on
            with suppress(FileNotFoundError):
                yield from self._lines_of(path.with_name(path.name + ".1"), path)
            self._offsets[path] = 0
        yield from self._lines_of(path, path)

    def _lines_of(self, file_path: Path, path: Path) -> Iterator[str]:
        """Return the lines of a file from where the log `path` was left."""
        with file_path.open("rb") as file:
            file.seek(self._offsets[path])
            while chunk := file.read(_CHUNK):
                self._offsets[path] += len(chunk)
                *lines, begun = (self._begun.get(path, b"") + chunk).split(b"\n")
                self._begun[path] = begun
                for line in lines:
                    yield line.decode("utf-8", "replace")
