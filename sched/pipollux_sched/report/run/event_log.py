"""The event log on disk: one JSON object per line, in chronological order.

A log may end in the middle of a line, if its writer was interrupted. Unreadable lines are skipped
and counted; a file with no readable event at all is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipollux_sched.errors import InputError

Event = Mapping[str, Any]

LARGEST = 1e18
"""Largest number of an event; larger or non-finite ones count as unknown."""


class EventLogError(InputError):
    """An event log that cannot be read; the text gives the file, the cause and the fix."""


class EventLog(NamedTuple):
    """Events in order, and the number of skipped entries."""

    events: list[Event]
    num_skipped: int = 0


def read_events(source: str | Path | Sequence[Event]) -> EventLog:
    """Read events from a file of JSON lines, or check a list of them; raise `EventLogError`."""
    if not isinstance(source, str | Path):
        return _checked(list(source))
    path = Path(source)
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise EventLogError(
            f"{path}: cannot read the event log ({reason}); "
            "give the path of an events.jsonl that `pipollux demo` wrote"
        ) from error
    log = _checked([_parse(line) for line in lines if line.strip()])
    if not log.events:
        raise EventLogError(
            f"{path}: no event found; an event log has one JSON object per line, "
            'each with a "time" and a "type"'
        )
    return log


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _checked(entries: Sequence[Any]) -> EventLog:
    events = [entry for entry in entries if _is_event(entry)]
    return EventLog(events, len(entries) - len(events))


def _is_event(entry: Any) -> bool:
    return (
        isinstance(entry, Mapping)
        and isinstance(entry.get("type"), str)
        and real(entry, "time") is not None
    )


def real(event: Mapping[str, Any], field: str) -> float | None:
    """Return a number of an event, None if missing."""
    value = event.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    return as_float if abs(as_float) < LARGEST else None


def whole(event: Mapping[str, Any], field: str) -> int | None:
    """Return an integer of an event, None if missing."""
    value = real(event, field)
    return None if value is None else round(value)


def text(event: Mapping[str, Any], field: str) -> str:
    """Return a text of an event, empty if missing."""
    value = event.get(field)
    return value if isinstance(value, str) else ""


def numbers(event: Mapping[str, Any], field: str) -> list[int]:
    """Return a list of integers of an event, empty if missing or not all of them are."""
    value = event.get(field)
    if not isinstance(value, list | tuple):
        return []
    found = [whole({field: item}, field) for item in value]
    return [] if None in found else [item for item in found if item is not None]


def names(event: Mapping[str, Any], field: str) -> list[str]:
    """Return a list of names of an event, empty if missing."""
    value = event.get(field)
    if not isinstance(value, list | tuple):
        return []
    return [item for item in value if isinstance(item, str)]
