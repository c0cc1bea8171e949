"""Values of command line options: whole numbers, sizes, links, picture formats.

`option` names the option in messages. Errors, ModelingError, have the value and the correct format.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from pipollux_perfmodel import Link
from pipollux_perfmodel.hints.codec import MAX_STEPS
from pipollux_perfmodel.timing.params import AUTO
from pipollux_utils.units import parse_bytes

from .errors import ModelingError

FORMATS = ("png", "svg", "pdf")
LARGEST = 1_000_000
MOST = 10_000
"""Numbers that one range may hold."""
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|ms|us|µs|ns)")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_sync_every(text: str) -> int:
    """Return H, or `AUTO` for ``auto``; ModelingError for other texts.

    >>> parse_sync_every("100"), parse_sync_every("auto")
    (100, -1)
    """
    if text == "auto":
        return AUTO
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MAX_STEPS):
        raise ModelingError(
            f"--sync-every {text!r}: a whole number of steps of at least 1 is needed, or auto"
        )
    return int(text)


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """Read numbers ``7`` from 1 on, and inclusive ranges ``low:high`` and ``low:high:step``.

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


def parse_size(text: str, option: str) -> int:
    """Read a number of bytes above 0, as in ``40GiB`` (2**30 bytes each) or ``40GB`` (1e9).

    >>> parse_size("1.5KiB", "--memory-limit")
    1536
    """
    num_bytes = _bytes(text)
    if num_bytes is None:
        raise ModelingError(
            f"{option} '{text}' is not allowed; write a size above 0, such as 40GiB, 40GB or 512MiB"
        )
    return num_bytes


def parse_link(text: str, option: str) -> Link:
    """Read ``BANDWIDTH/s`` or ``BANDWIDTH/s,LATENCY``; without a latency it is 0.

    >>> parse_link("20GB/s,2ms", "--link")
    Link(latency=0.002, bandwidth=20000000000.0)
    """
    speed, comma, latency = (part.strip() for part in text.partition(","))
    bandwidth = _bytes(speed.removesuffix("/s")) if speed.endswith("/s") else None
    seconds = _seconds(latency) if comma else 0.0
    if bandwidth is None or seconds is None:
        raise ModelingError(
            f"{option} '{text}' is not allowed; write bytes per second, such as 20GB/s, "
            "or with the seconds of every copy, such as 20GB/s,10us"
        )
    return Link(latency=seconds, bandwidth=float(bandwidth))


def spell_size(num_bytes: float) -> str:
    """Spell a size, rounded up, so that the spelled limit is sufficient.

    >>> spell_size(1025), spell_size(40 * 2**30)
    ('1.001KiB', '40GiB')
    """
    power = min(int(math.log2(max(num_bytes, 1.0)) // 10), len(_UNITS) - 1)
    thousandths = math.ceil(num_bytes / 1024**power * 1000)
    return f"{thousandths / 1000:.15g}{_UNITS[power]}"


def picture_format(path: Path) -> str:
    """Return the format given by a picture's name, one of `FORMATS`."""
    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise ModelingError(
            f"'{path}' has no known picture format; make its name end in "
            + ", ".join(f".{name}" for name in FORMATS)
        )
    return suffix


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
    # isdecimal alone would accept digits of other scripts.
    if not (part.isascii() and part.isdecimal()) or not 1 <= int(part[:20]) <= LARGEST:
        raise ModelingError(
            f"{option} '{whole}' is not allowed; write whole numbers from 1 to {LARGEST}, "
            "such as 8, or 1,2,4, or 1:16, or 1:16:2"
        )
    return int(part)


def _bytes(text: str) -> int | None:
    try:
        return parse_bytes(text) or None
    except (ValueError, OverflowError):
        return None


def _seconds(text: str) -> float | None:
    match = _TIME.fullmatch(text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else math.inf
    return seconds if math.isfinite(seconds) else None
