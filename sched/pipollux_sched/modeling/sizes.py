"""Bytes and links as they are written on a command line: ``40GiB``, ``20GB/s``, ``20GB/s,10us``."""

from __future__ import annotations

import math
import re

from pipollux_perfmodel import Link
from pipollux_sched.utils.units import parse_bytes

from .errors import ModelingError

_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|ms|us|µs|ns)")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_size(text: str, option: str) -> int:
    """Read a number of bytes above 0, as in ``40GiB`` (2**30 bytes each) or ``40GB`` (1e9).

    Raises:
        ModelingError: naming the option, its value, and how to write it.

    Example:
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

    Raises:
        ModelingError: naming the option, its value, and how to write it.

    Example:
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
    """Spell a size, rounded up, so that a limit which is spelled so is enough.

    Example:
        >>> spell_size(1025), spell_size(40 * 2**30)
        ('1.001KiB', '40GiB')
    """
    power = min(int(math.log2(max(num_bytes, 1.0)) // 10), len(_UNITS) - 1)
    thousandths = math.ceil(num_bytes / 1024**power * 1000)
    return f"{thousandths / 1000:.15g}{_UNITS[power]}"


def _bytes(text: str) -> int | None:
    try:
        return parse_bytes(text) or None
    except (ValueError, OverflowError):
        return None


def _seconds(text: str) -> float | None:
    match = _TIME.fullmatch(text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else math.inf
    return seconds if math.isfinite(seconds) else None
