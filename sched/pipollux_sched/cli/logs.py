"""`pipollux logs`: print the logs of a job, and follow them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias

import typer

from .console import CommandError, LineFormat, print_json_line
from .options import JobName, LineOutput, StateDirectory
from .reader import POLL_INTERVAL, reading

if TYPE_CHECKING:
    from .reader import Reader

_Log: TypeAlias = tuple[int, int]
"""Generation and replica."""


def logs(
    name: JobName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")
    ] = False,
    generation: Annotated[
        int | None, typer.Option(min=1, help="Which generation.", show_default="the last one")
    ] = None,
    replica: Annotated[
        int | None, typer.Option(min=0, help="Which pipeline replica.", show_default="all")
    ] = None,
    output: LineOutput = LineFormat.text,
    state_dir: StateDirectory = None,
) -> None:
    r"""Print the logs of a job's replicas.

    Each start of a job is a generation, and each pipeline replica has a log of
    its own; if there are several, lines begin with
    \[generation.replica].
    """
    with reading(state_dir) as reader:
        job = reader.job(name)
        log = LogReader(reader, name, generation, replica)
        for line in _lines(log, reader, name, follow):
            if output is LineFormat.json:
                print_json_line(line.to_dict())
            else:
                typer.echo(line.prefixed)
    if not log.found:
        which = "" if generation is None else f" of generation {generation}"
        whose = "" if replica is None else f" of replica {replica}"
        raise CommandError(
            f"there is no log{whose}{which} of job '{name}', which is {job.phase.value}: "
            + job.message.partition("\n")[0]
        )


class LogLine(NamedTuple):
    """One line that a replica wrote."""

    generation: int
    replica: int
    line: str
    several: bool
    """Whether there is more than one log, so that each line needs a prefix."""

    @property
    def prefixed(self) -> str:
        """The line, with a prefix if there are several logs."""
        return f"[{self.generation}.{self.replica}] {self.line}" if self.several else self.line

    def to_dict(self) -> dict[str, int | str]:
        """Return it as plain data."""
        return {"generation": self.generation, "replica": self.replica, "line": self.line}


class LogReader:
    """Reads whole lines of a job's logs, each line once.

    Where there is more than one log, each line begins with the generation and replica it is from.

    Args:
        reader: reads the logs.
        job: name of the job.
        generation: its number; None: the latest one and those that follow.
        replica: number of the pipeline replica; None: all.
    """

    def __init__(
        self, reader: Reader, job: str, generation: int | None, replica: int | None
    ) -> None:
        self._reader = reader
        self._job = job
        self._generation = generation
        self._replica = replica
        self._first: int | None = None
        self._offsets: dict[_Log, int] = {}
        self._begun: dict[_Log, bytes] = {}

    @property
    def found(self) -> bool:
        """Whether there was any log to read."""
        return bool(self._offsets)

    def read(self) -> Iterator[LogLine]:
        """Return the lines that were finished since the last call."""
        logs = self._logs()
        several = len(self._offsets) > 1 or len(logs) > 1
        for log in logs:
            for line in self._new_lines(log):
                yield LogLine(*log, line, several)

    def rest(self) -> Iterator[LogLine]:
        """Return what follows the last line break of each log."""
        for log, begun in sorted(self._begun.items()):
            if begun:
                self._begun[log] = b""
                yield LogLine(*log, begun.decode("utf-8", "replace"), len(self._offsets) > 1)

    def _logs(self) -> list[_Log]:
        found = [(log.generation, log.replica) for log in self._reader.logs(self._job)]
        if self._generation is not None:
            found = [log for log in found if log[0] == self._generation]
        elif found:
            self._first = self._first or found[-1][0]
            found = [log for log in found if log[0] >= self._first]
        return [log for log in found if self._replica in (None, log[1])]

    def _new_lines(self, log: _Log) -> Iterator[str]:
        offset = self._offsets.setdefault(log, 0)
        while (part := self._reader.read_log(self._job, *log, offset)).content:
            self._offsets[log] = offset = part.offset
            *lines, self._begun[log] = (self._begun.get(log, b"") + part.content).split(b"\n")
            for line in lines:
                yield line.decode("utf-8", "replace")


def _lines(log: LogReader, reader: Reader, name: str, follow: bool) -> Iterator[LogLine]:
    while True:
        ended = reader.job(name).phase.ended  # checked first, so that the last lines are not missed
        yield from log.read()
        if ended or not follow:
            yield from log.rest()
            return
        time.sleep(POLL_INTERVAL)
