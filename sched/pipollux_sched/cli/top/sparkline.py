"""The slots of a job over time, as one line of characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BARS = "▁▂▃▄▅▆▇█"
WAITS = "·"
"""Drawn while a job exists and holds no slots."""

WINDOWS = (60.0, 300.0, 900.0, 3600.0, 6 * 3600.0, 24 * 3600.0, 7 * 24 * 3600.0)


@dataclass(frozen=True)
class Span:
    """A number of slots held from one time to another."""

    begin: float
    end: float
    slots: int


def window_for(seconds: float) -> float:
    """Return the shortest window that covers a number of seconds."""
    return next((window for window in WINDOWS if window >= seconds), WINDOWS[-1])


def bars(values: Sequence[float], top: float) -> str:
    """Draw numbers from 0 to `top`, one character each; a nonzero one is always visible.

    Example:
        >>> bars([0, 0.1, 4, 8, 9], 8)
        ' ▁▄██'
    """
    heights = (math.ceil(len(BARS) * value / max(top, 1e-9) - 1e-9) for value in values)
    return "".join(BARS[min(height, len(BARS)) - 1] if height > 0 else " " for height in heights)


def sparkline(
    spans: Sequence[Span],
    alive: tuple[float, float],
    begin: float,
    end: float,
    width: int,
    top: int,
) -> str:
    """Draw the slots held between two times, as the mean of each of `width` equal intervals.

    Nothing is drawn before the job was submitted and after its end (`alive`); `top` slots are the
    highest bar.

    Example:
        >>> sparkline([Span(1, 2, 1), Span(2, 3, 4)], (0, 3), -1, 3, 4, 4)
        ' ·▂█'
    """
    step = (end - begin) / max(width, 1)
    line = []
    for number in range(width):
        left = begin + number * step
        right = left + step
        held = sum(
            max(0.0, min(span.end, right) - max(span.begin, left)) * span.slots for span in spans
        )
        if held > 0:
            height = math.ceil(len(BARS) * held / step / max(top, 1) - 1e-9)
            line.append(BARS[min(max(height, 1), len(BARS)) - 1])
        else:
            line.append(WAITS if alive[0] < right and alive[1] > left else " ")
    return "".join(line)
