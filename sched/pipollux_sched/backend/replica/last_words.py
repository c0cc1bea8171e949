"""The lines of a replica's log that show why it failed, before torchrun's own report."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import NamedTuple

from pipollux_sched.store.log_files import read_tail

_REPORT = re.compile(
    r"^E\d{4} .*torch/distributed/elastic/.*failed \(exitcode: (?P<status>-?\d+)\)"
)
_AGENT_LINE = re.compile(r"^[EWI]\d{4} .*torch/distributed/")

_READ_LIMIT = 256 * 1024
_LINE_LIMIT = 300


class LastWords(NamedTuple):
    """The end of a script's output."""

    status: int | None
    """Exit status, negative for a signal; None if torchrun reported none."""
    lines: list[str]

    def describe(self) -> str:
        """Describe how it ended, as a predicate for "replica 0 …"."""
        if self.status is None:
            return "ended without a report by torchrun"
        if self.status >= 0:
            return f"ended with exit status {self.status}"
        try:
            name = signal.Signals(-self.status).name
        except ValueError:
            name = f"signal {-self.status}"
        return f"was ended by {name}"


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log, at most `count`; none if it cannot be read."""
    tail = read_tail(path, _READ_LIMIT)
    return tail.decode("utf-8", "replace").splitlines()[-count:] if count > 0 else []


def last_words(path: Path, status: int | None, count: int = 20) -> LastWords:
    """Read how a script ended, and its last lines before torchrun's report.

    If it printed nothing and its end is unknown, they are torchrun's; `status` is the default.
    """
    lines = last_lines(path, 100_000)
    reports = [index for index, line in enumerate(lines) if _REPORT.match(line)]
    report = _REPORT.match(lines[reports[0]]) if reports else None
    own = [line for line in lines[: reports[0] if reports else None] if not _AGENT_LINE.match(line)]
    while own and not own[-1].strip():
        own.pop()
    said = own or ([] if report else lines)
    shown = [line[:_LINE_LIMIT] for line in said[-count:]]
    return LastWords(int(report["status"]) if report else status, shown)
