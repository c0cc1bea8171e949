"""The result file of a replica's agent: how the script ended, and at which step it stopped.

The agent (`pipollux_agent.agent`) writes it as JSON into ``PIPOLLUX_RESULT_FILE``. The scheduler,
which may not run then, reads it from the state directory or a container's termination message.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipollux_protocol.files import AgentResult, ResultError

_NO_REMEDY = frozenset(("SyntaxError", "ImportError"))
"""Exceptions that a restart of the same script would raise again, including subclasses."""


class ScriptError(NamedTuple):
    """The exception that ended a script."""

    text: str
    """Type and message, one line."""
    cannot_start: bool
    """Whether the script, or an import, is broken, so that a restart would fail, too."""


class ReplicaResult(NamedTuple):
    """The result of a replica's agent; the defaults are those of an agent that was killed."""

    error: ScriptError | None = None
    asked: bool = False
    left: bool = False
    """Whether an agent wrote this; False: it was killed or had not begun, or there is none."""
    stopped_step: int | None = None
    """The step at which the replicas agreed to stop, and saved; None if they did not."""
    report: Mapping[str, Any] | None = None
    """The training report that could not be sent, unvalidated."""

    @classmethod
    def read(cls, path: Path) -> ReplicaResult:
        """Read a result from a file; without one, the agent was killed."""
        try:
            return cls.parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return cls()

    @classmethod
    def parse(cls, text: str) -> ReplicaResult:
        """Parse a result; invalid text counts as none."""
        try:
            found = AgentResult.model_validate_json(text)
        except ValueError:
            return cls()
        return cls(
            error=None if found.error is None else _error(found.error),
            asked=found.asked,
            stopped_step=found.step,
            report=found.report,
            left=True,
        )


def out_of_memory(limit: int, used: int) -> ScriptError:
    """Return the error of a replica that was ended because it exceeded `memory_limit`."""
    gib = 2**30
    text = f"out of memory: limit {limit / gib:.2f} GiB, used {used / gib:.2f} GiB"
    return ScriptError(f"{text}; raise memory_limit in the job file, or use less", False)


def _error(kept: ResultError) -> ScriptError:
    lines = kept.message.splitlines()
    text = lines[0] if lines else ""
    if "SyntaxError" in kept.types and len(lines) > 1:  # first line: place, last line: error
        text = f"{lines[-1]} ({text.strip()})"
    return ScriptError(text, not kept.loaded or not _NO_REMEDY.isdisjoint(kept.types))
