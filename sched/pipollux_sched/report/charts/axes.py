"""Scales, tick marks and the frame of a chart panel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pipollux_sched.utils.text import clock, plain

from .svg import Drawing

_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


class Scale(NamedTuple):
    """Maps values from `low` to `high` onto units from `first` to `last`, or their logarithms."""

    low: float
    high: float
    first: float
    last: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Return where `value` lies in the drawing."""
        low, high, at = self.low, self.high, value
        if self.logarithmic:
            low, high, at = math.log(low), math.log(high), math.log(value)
        span = high - low
        share = (at - low) / span if span > 0 else 0.5
        return self.first + share * (self.last - self.first)


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return round numbers (1, 2, 2.5, 5 times a power of ten) from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def whole_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return round whole numbers from `low` to `high`, for counts."""
    return [tick for tick in ticks(low, high, about) if tick == round(tick)]


def clock_ticks(low: float, high: float, about: int = 7) -> list[float]:
    """Return round moments from `low` to `high`, in seconds."""
    rough = (high - low) / max(1, about)
    step = next((s for s in _SECONDS if s >= rough), None)
    if step is None:
        step = 86400 * math.ceil(rough / 86400)
    return [float(n * step) for n in range(math.ceil(low / step), int(high // step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten from `low` to `high`, all digits when these are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), range(1, 10)):
        marks = [m * 10.0**p for p in powers for m in digits]
        marks = [mark for mark in marks if low <= mark <= high]
        if len(marks) > 3:
            break
    return marks


def padded(values: Iterable[float], *, zero: bool = False) -> tuple[float, float]:
    """Return limits with a little room around `values`; with `zero`, they begin at nought."""
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return 0.0, 1.0
    low, high = min(known), max(known)
    if zero:
        return 0.0, high * 1.08 or 1.0
    room = 0.06 * (high - low) or 0.5 * abs(high) or 0.5
    return low - room, high + room


class Panel(NamedTuple):
    """One pair of axes: `x` runs from left to right, `y` from bottom (`first`) to top (`last`)."""

    x: Scale
    y: Scale

    @property
    def left(self) -> float:
        """Where the panel begins."""
        return self.x.first

    @property
    def right(self) -> float:
        """Where it ends."""
        return self.x.last

    @property
    def top(self) -> float:
        """Its upper edge."""
        return self.y.last

    @property
    def bottom(self) -> float:
        """Its lower edge."""
        return self.y.first

    def draw_y(
        self,
        drawing: Drawing,
        marks: Sequence[float],
        write: Callable[[float], str] = plain,
        *,
        labels: bool = True,
    ) -> None:
        """Draw a light line and a label at each of `marks`."""
        for mark in marks:
            y = self.y(mark)
            drawing.line(self.left, y, self.right, y, "grid")
            if labels:
                drawing.text(self.left - 8, y + 4, write(mark), "tick", at="end")

    def draw_x(
        self,
        drawing: Drawing,
        marks: Sequence[float],
        write: Callable[[float], str] = clock,
        *,
        label: str = "",
    ) -> None:
        """Draw the axis below, its marks and what it measures."""
        drawing.line(self.left, self.bottom, self.right, self.bottom, "axis")
        for mark in marks:
            x = self.x(mark)
            drawing.line(x, self.bottom, x, self.bottom + 4, "axis")
            drawing.text(x, self.bottom + 18, write(mark), "tick", at="middle")
        if label:
            drawing.text(self.right, self.bottom + 35, label, "axis-label", at="end")

    def points(self, pairs: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        """Return pairs of values as places in the drawing."""
        return [(self.x(a), self.y(b)) for a, b in pairs]

    def staircase(self, pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Return places where each value holds until the next one begins."""
        places: list[tuple[float, float]] = []
        for x, y in self.points(pairs):
            if places:
                places.append((x, places[-1][1]))
            places.append((x, y))
        return places
