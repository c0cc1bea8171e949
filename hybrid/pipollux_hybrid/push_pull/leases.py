"""The positions that a replica trains on, as the ledger leases them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from pipollux_hybrid.job.batch import BatchShape, BatchSlice

Cut = Callable[[int, int, BatchShape], Iterator[tuple[range, BatchSlice]]]
"""Returns the parts of an iteration from its first position, its size, and the batch's shape."""


class Span(NamedTuple):
    """Positions of one iteration or of a lease."""

    start: int
    stop: int
    skip: tuple[int, ...]
    """Layers that have been trained on them by a replica that was lost."""


class Leases:
    """Leased positions: those that are held, and those of iterations under way.

    Args:
        request: Returns the ledger's next answer (see :meth:`~pipollux_hybrid.push_pull.ledger
            .Ledger.answer`), for a number of samples per step.
    """

    def __init__(self, request: Callable[[int], dict[str, Any]]) -> None:
        self._request = request
        self._held: deque[Span] = deque()
        self._under_way: deque[Span] = deque()

    def parts(
        self, order: Tensor, shape: BatchShape, cut: Cut, fewest: int = 1
    ) -> Iterator[BatchSlice]:
        """Yield parts of iterations until no position is left for now.

        Args:
            order: The epoch's permutation, shape [num_samples].
            shape: Shape of a batch.
            cut: Divides an iteration.
            fewest: Samples that an iteration should have at least, as for batch normalization.
        """
        self._held.extendleft(reversed(self._under_way))  # of a segment that ended early
        self._under_way.clear()
        while True:
            if not self._held:
                answer = self._request(shape.batch_size)
                if answer["status"] != "leased":
                    return
                self.hold(answer)
            span = self._held.popleft()
            stop = min(span.start + shape.batch_size, span.stop)
            lacking = fewest - (span.stop - stop)
            if stop < span.stop and 0 < lacking <= stop - span.start - fewest:
                stop -= lacking
            if stop < span.stop:
                self._held.appendleft(span._replace(start=stop))
            self._under_way.append(span._replace(stop=stop))
            for positions, part in cut(span.start, stop - span.start, shape):
                yield part._replace(indices=order[positions.start : positions.stop].tolist())

    def hold(self, answer: dict[str, Any]) -> None:
        """Keep the positions of an answer."""
        start, stop = answer["span"]
        self._held.append(Span(start, stop, tuple(answer["skip"])))

    @property
    def current(self) -> Span:
        """Positions of the iteration under way."""
        return self._under_way[0]

    def done(self) -> Span:
        """Return the positions of the iteration that has ended."""
        return self._under_way.popleft()

    def drop(self) -> None:
        """Forget all positions, as they were leased to others."""
        self._held.clear()
        self._under_way.clear()
