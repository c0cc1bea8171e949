"""How a replica ended: after a stop signal or not, and the message if it failed."""

from __future__ import annotations

from pathlib import Path

from pipollux_protocol.exit_statuses import STOPPED

from .base import Ended
from .replica.last_words import last_words


def has_stopped(end: Ended) -> bool:
    """Return whether a replica ended like one that was asked to stop."""
    return end.status in (STOPPED, -15)


def was_asked(end: Ended) -> bool:
    """Return whether a replica was ended from outside, or its agent received a stop signal."""
    return end.result.asked or bool(end.lost)


def describe_failure(replica: int, node: str, ended: Ended, log: Path) -> tuple[str, bool]:
    """Return why a replica failed, with the end of its log, and whether its script cannot start."""
    error = ended.result.error
    words = last_words(log, ended.status)
    head = f"Replica {replica} on {node} {words.describe()}"
    if has_stopped(ended) and not was_asked(ended):
        head += ", but was not asked to stop"
    said = error.text if error else words.lines[-1].strip() if words.lines else ""
    head += f": {said}" if said else f" and printed nothing ({log.name})."
    end = [f"The end of {log.name}:", *words.lines] if words.lines else []
    return "\n".join([head, *end]), error is not None and error.cannot_start


def describe_loss(ended: Ended, log: Path) -> str:
    """Return why a replica ended before it took part, in a sentence or two."""
    words = last_words(log, ended.status)
    said = ended.lost or f"It {words.describe()}."
    return f"{said} {words.lines[-1].strip() if words.lines else ''}".strip()
