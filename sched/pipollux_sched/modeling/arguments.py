"""Whole numbers as they are written on a command line: ``1:16``, ``1,2,4``, ``1:16:2``."""

from __future__ import annotations

from .errors import ModelingError

LARGEST = 1_000_000
MOST = 10_000
"""Numbers that one range may hold."""


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """Read numbers from 1 on, and ranges of them with their last one included; each comes once.

    Args:
        text: numbers ``7``, ranges ``low:high`` and ``low:high:step``, with commas between.
        option: where it was given, for complaints.

    Raises:
        ModelingError: naming the piece that is wrong, and how to write it.

    Example:
        >>> parse_numbers("1:7:2,16", "--replicas")
        (1, 3, 5, 7, 16)
    """
    numbers: dict[int, None] = {}
    for piece in text.split(","):
        found = _piece(piece.strip(), option)
        if len(numbers) + len(found) > MOST:
            raise ModelingError(f"{option} '{text}' has more than {MOST} numbers; give fewer")
        numbers.update(dict.fromkeys(found))
    return tuple(sorted(numbers))


def parse_bounds(text: str, option: str) -> tuple[int | None, int | None]:
    """Read ``LO:HI``, of which either may be left out.

    Raises:
        ModelingError: naming what is wrong, and how to write it.

    Example:
        >>> parse_bounds("8:", "--atomic-bsz")
        (8, None)
    """
    low_text, colon, high_text = text.partition(":")
    if not colon or ":" in high_text:
        raise ModelingError(f"{option} '{text}' is no range; write LO:HI, such as 8:64, or 8:")
    low, high = (
        _number(part.strip(), text, option) if part.strip() else None
        for part in (low_text, high_text)
    )
    if low is not None and high is not None and low > high:
        raise ModelingError(f"{option} '{text}' runs backwards; write {high}:{low}")
    return low, high


def _piece(piece: str, option: str) -> range:
    parts = [_number(part.strip(), piece, option) for part in piece.split(":")]
    if len(parts) > 3:
        raise ModelingError(f"{option} '{piece}' has {len(parts)} parts; write low:high:step")
    low, high = parts[0], parts[1] if len(parts) > 1 else parts[0]
    step = parts[2] if len(parts) > 2 else 1
    if low > high:
        raise ModelingError(f"{option} '{piece}' runs backwards; write {high}:{low}")
    return range(low, high + 1, step)


def _number(part: str, whole: str, option: str) -> int:
    # isdecimal alone would let other scripts' digits through.
    if not (part.isascii() and part.isdecimal()) or not 1 <= int(part[:20]) <= LARGEST:
        raise ModelingError(
            f"{option} '{whole}' is not allowed; write whole numbers from 1 to {LARGEST}, "
            "such as 8, or 1,2,4, or 1:16, or 1:16:2"
        )
    return int(part)
