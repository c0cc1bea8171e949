"""Times, numbers and other people's words, as a terminal shows them."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime

DASH = "–"
_UNSEEN = "\N{REPLACEMENT CHARACTER}"


def one_line(text: object, limit: int | None = None) -> str:
    r"""Return a text on one line, without what would move a terminal's cursor.

    Example:
        >>> one_line("a\x1b[31mb\nc"), one_line("a-very-long-name", 8)
        ('a�[31mb c', 'a-very-…')
    """
    line = " ".join(str(text).split())
    clean = "".join(char if char.isprintable() else _UNSEEN for char in line)
    return clean if limit is None or len(clean) <= limit else clean[: max(limit - 1, 0)] + "…"


def first_line(text: str) -> str:
    """Return a message without the lines of a log that may follow it."""
    return text.partition("\n")[0]


def spell_age(seconds: float) -> str:
    """Spell a duration as in ``42s``, ``3m07s``, ``5h12m``, ``3d04h``."""
    minutes, left = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{left:02d}s" if minutes else f"{left}s"


def spell_moment(moment: float | None, now: float | None = None) -> str:
    """Spell a time of the clock, and how long ago (or ahead) it is."""
    if moment is None:
        return DASH
    apart = (time.time() if now is None else now) - moment
    when = datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S")
    return f"{when} ({spell_age(apart)} ago)" if apart >= 0 else f"{when} (in {spell_age(-apart)})"


def spell_nodes(nodes: Sequence[str]) -> str:
    """Spell where the replicas of an allocation lie, each node once."""
    counts = sorted(Counter(nodes).items())
    return ", ".join(name if count == 1 else f"{name} ×{count}" for name, count in counts) or DASH


def number(value: float | None, digits: int = 3) -> str:
    """Spell a number with so many digits that count, and no exponent where it is not tiny.

    Example:
        >>> number(0.012345), number(1234.5), number(None)
        ('0.0123', '1234', '–')
    """
    if value is None or not math.isfinite(value):
        return DASH
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(0, digits - 1 - magnitude)}f}"


def count(how_many: int, noun: str) -> str:
    """Spell a count and its noun: ``1 replica``, ``2 replicas``."""
    return f"{how_many} {noun}" if how_many == 1 else f"{how_many} {noun}s"
