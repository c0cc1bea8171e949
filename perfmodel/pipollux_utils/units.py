"""Parsing of sizes and durations with units."""

from __future__ import annotations

import re

_MOST_DURATION = 100 * 365 * 86400.0
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGTP]i?)?B?")
_POWERS = " KMGTP"
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])?")
MOST_SECONDS = 7 * 86400.0
"""Longest interval between periodic actions of a scheduler: a week."""
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str | int) -> int:
    """Return a size in bytes: ``8GiB`` (2**33), ``500MB`` (5e8), ``8Gi``, or a plain number."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError(
            f"{_shown(text)} is not a size; give bytes, or a text such as 8GiB or 500MB"
        )
    number, unit = match.groups()
    unit = str(unit or " ")
    base = 1024 if unit.endswith("i") else 1000
    return round(float(number) * float(base) ** _POWERS.index(unit[0].upper()))


def parse_duration(text: str | float | None) -> float | None:
    """Return a duration in seconds: ``90s``, ``45m``, ``36h``, ``2d``, or a plain number. Raises
    ValueError unless it is above 0 and no longer than a century.
    """
    if text is None:
        return None
    if isinstance(text, int | float) and not isinstance(text, bool):
        seconds = float(text)
    else:
        match = _DURATION.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise ValueError(
                f"{_shown(text)} is not a duration; give seconds, or a text such as 45m or 36h"
            )
        seconds = float(match[1]) * _SECONDS[match[2] or "s"]
    if not seconds > 0:
        raise ValueError(f"{text!r} is not above 0; give a duration such as 36h")
    if seconds > _MOST_DURATION:
        raise ValueError(f"{str(text)[:40]!r} is more than 100 years; give a duration such as 36h")
    return seconds


def check_seconds(**times: float) -> None:
    """Raise ValueError for a timeout, given by its name, outside of (0, `MOST_SECONDS`]."""
    for name, seconds in times.items():
        if not 0 < seconds <= MOST_SECONDS:
            raise ValueError(
                f"{name} is {seconds}; give seconds above 0 and up to {MOST_SECONDS:.0f}, a week"
            )


def _shown(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
