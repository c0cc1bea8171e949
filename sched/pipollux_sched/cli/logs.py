"""`pipollux logs`: print the logs of a job, and follow them."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias

import typer

from pipollux_sched.lifecycle import Phase
from pipollux_sched.store import ListedPhase

from .console import CommandError, LineFormat, print_json_line
from .options import JobName, LineOutput, StateDirectory
from .reader import FOLLOWING, POLL_INTERVAL, reading, tell_unserved

if TYPE_CHECKING:
    from .reader import Reader

_Log: TypeAlias = tuple[int, int]
"""Attempt and replica."""
_END = re.compile(rb"(\r?\n|\r(?=[^\n]))")
"""End of a line: a line break, or the carriage return of a progress bar."""
_SEQUENCE = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]*m)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)
"""Control sequences: a colour; other CSI sequences; strings such as titles; short ones."""
_CONTROL = re.compile(r"(?!\t)[\x00-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[[0-9;:]*m)")
_RESET = "\x1b[0m"


def logs(
    name: JobName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new output until the job ends.")
    ] = False,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="Number of the attempt.", show_default="the last one")
    ] = None,
    replica: Annotated[
        int | None, typer.Option(min=0, help="Number of the pipeline replica.", show_default="all")
    ] = None,
    output: LineOutput = LineFormat.text,
    state_dir: StateDirectory = None,
) -> None:
    r"""Print the logs of a job.

    Each start of a job is an attempt, and each pipeline replica of an attempt has
    its own log. If there are several logs, lines begin with \[attempt.replica].

    On a terminal, colours are kept and other control sequences are removed. Files
    and pipes receive the output of the script unchanged.

    Exit code: 0 done; 1 there is no log, or with --follow the job failed or was
    cancelled.
    """
    with reading(state_dir) as reader:
        job = reader.job(name)
        if job.sweep == job.name:
            raise CommandError(
                f"job '{name}' is a sweep, and each of its trials has a log of its own; see the "
                f"first one with: pipollux logs {name}-0"
            )
        if follow and not job.phase.ended:
            tell_unserved(reader, FOLLOWING)
        log = LogReader(reader, name, attempt, replica)
        on_terminal = sys.stdout.isatty()
        for line in _lines(log, reader, name, follow):
            if output is LineFormat.json:
                if line.line or not line.redrawn:
                    print_json_line(line.to_dict())
            else:
                typer.echo(line.harmless if on_terminal else line.raw, nl=False, color=True)
        job = reader.job(name) if follow else job
    if not log.found:
        which = "" if attempt is None else f" of attempt {attempt}"
        whose = "" if replica is None else f" of replica {replica}"
        raise CommandError(
            f"there is no log{whose}{which} of job '{name}', which is {job.phase.value}: "
            + job.message.partition("\n")[0]
        )
    if follow and job.phase is Phase.FAILED:
        how = "was cancelled" if job.listed_phase is ListedPhase.CANCELLED else "failed"
        raise CommandError(f"{name} {how}; see: pipollux describe {name}")


class LogLine(NamedTuple):
    """One line of a log, or one state of a line that a progress bar redraws."""

    attempt: int
    replica: int
    content: bytes
    end: bytes
    """The line break, or the carriage return of a progress bar."""
    several: bool
    """Whether there are several logs, so that lines need a prefix."""

    @property
    def line(self) -> str:
        """The line as text."""
        return self.content.decode("utf-8", "replace")

    @property
    def redrawn(self) -> bool:
        """Whether the line was redrawn."""
        return self.end == b"\r"

    @property
    def raw(self) -> bytes:
        """The line for a file or pipe: unchanged, with a prefix if there are several logs."""
        if not self.several:
            return self.content + self.end
        # Several replicas cannot redraw the same line.
        end = b"\n" if self.redrawn else self.end
        return self._prefix.encode() + self.content + end

    @property
    def harmless(self) -> str:
        """The line for a terminal, without control sequences other than colours."""
        redrawn = self.redrawn and not self.several
        return f"{self._prefix}{harmless(self.line)}" + ("\r" if redrawn else "\n")

    @property
    def _prefix(self) -> str:
        return f"[{self.attempt}.{self.replica}] " if self.several else ""

    def to_dict(self) -> dict[str, int | str]:
        """Return it as plain data."""
        return {"attempt": self.attempt, "replica": self.replica, "line": self.line}


def harmless(line: str) -> str:
    r"""Return a line without control sequences other than colours.

    Others could retitle the window, overwrite earlier lines, or inject input to the terminal.

    >>> harmless("\x1b]0;title\x07a \x1b[31mred\x1b[0m\x1b[2Jb\tc\x08")
    'a \x1b[31mred\x1b[0mb\tc\ufffd'
    """
    kept = _SEQUENCE.sub(lambda found: found[0] if found["colour"] else "", line)
    shown = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", kept)
    coloured = "\x1b[" in shown and not shown.endswith(_RESET)
    return shown + _RESET if coloured else shown


class LogReader:
    """Reads whole lines of a job's logs, each once; without `attempt`, from the latest one on."""

    def __init__(self, reader: Reader, job: str, attempt: int | None, replica: int | None) -> None:
        self._reader = reader
        self._job = job
        self._attempt = attempt
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
            for content, end in self._new_lines(log):
                if content or not (several and end == b"\r"):
                    yield LogLine(*log, content, end, several)

    def rest(self) -> Iterator[LogLine]:
        """Return what follows the last line break of each log."""
        for log, begun in sorted(self._begun.items()):
            if begun:
                self._begun[log] = b""
                yield LogLine(*log, begun.rstrip(b"\r"), b"\n", len(self._offsets) > 1)

    def _logs(self) -> list[_Log]:
        found = [(log.attempt, log.replica) for log in self._reader.logs(self._job)]
        if self._attempt is not None:
            found = [log for log in found if log[0] == self._attempt]
        elif found:
            self._first = self._first or found[-1][0]
            found = [log for log in found if log[0] >= self._first]
        return [log for log in found if self._replica in (None, log[1])]

    def _new_lines(self, log: _Log) -> Iterator[tuple[bytes, bytes]]:
        offset = self._offsets.setdefault(log, 0)
        while (part := self._reader.read_log(self._job, *log, offset)).content:
            self._offsets[log] = offset = part.offset
            # What ends with a carriage return may go on with a line feed.
            *lines, self._begun[log] = _END.split(self._begun.get(log, b"") + part.content)
            yield from zip(lines[::2], lines[1::2], strict=True)


def _lines(log: LogReader, reader: Reader, name: str, follow: bool) -> Iterator[LogLine]:
    while True:
        ended = reader.job(name).phase.ended  # checked first, so that the last lines are not missed
        yield from log.read()
        if ended or not follow:
            yield from log.rest()
            return
        time.sleep(POLL_INTERVAL)
