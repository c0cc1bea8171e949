"""Sets of positions in an epoch, as disjoint intervals."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Interval(NamedTuple):
    """Positions from ``start`` to before ``stop``."""

    start: int
    stop: int


class IntervalSet:
    """A set of whole numbers.

    Example:
        >>> done = IntervalSet([(0, 4), (4, 6)])
        >>> done.add(8, 10)
        >>> [tuple(interval) for interval in done], [tuple(x) for x in done.missing(0, 12)]
        ([(0, 6), (8, 10)], [(6, 8), (10, 12)])
    """

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in intervals:
            self.add(start, stop)

    def __iter__(self) -> Iterator[Interval]:
        return map(Interval, self._starts, self._stops)

    def __len__(self) -> int:
        return sum(self._stops) - sum(self._starts)

    def add(self, start: int, stop: int) -> None:
        """Add the numbers from ``start`` to before ``stop``, joining what touches them."""
        if stop <= start:
            return
        first, last = bisect_left(self._stops, start), bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last], self._stops[first:last] = [start], [stop]

    def missing(self, start: int, stop: int) -> Iterator[Interval]:
        """Yield the intervals from ``start`` to before ``stop`` that are not in the set."""
        for index in range(bisect_right(self._stops, start), len(self._starts)):
            if self._starts[index] >= stop:
                break
            if start < self._starts[index]:
                yield Interval(start, self._starts[index])
            start = max(start, self._stops[index])
        if start < stop:
            yield Interval(start, stop)

    def overlap(self, start: int, stop: int) -> int:
        """Return how many of the numbers from ``start`` to before ``stop`` are in the set."""
        return stop - start - sum(hole.stop - hole.start for hole in self.missing(start, stop))
