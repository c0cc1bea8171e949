"""Truncated backpropagation through time over one long text, elastically.

The text is cut into contiguous rows, one per sample of a batch over all replicas, and each batch is
the next window of ``bptt_len`` tokens of every row, so that hidden states can be carried on
(Williams and Peng, 1990). When the number of rows changes within an epoch, the rest of all rows is
concatenated and cut again. The sequence of (rows, tokens taken per row) determines the rest of the
text, and is the whole state.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job.batch import BatchShape, BatchSlice, split_evenly

from .loop import ElasticLoop

__all__ = ["AdaptiveBPTTIterator", "TextRows"]


class TextRows:
    """The rest of a text, cut into rows of equal length.

    A position stands for a pair of a token and its successor, the input and its target. Pairs that
    do not fill a column of the rows are the *tail*, which comes last. ``cuts`` has (rows, pairs
    taken per row) for each cut of the text; the last one is the current cut.

    Example:
        Ten pairs in two rows, of which two windows of one pair were taken, then in three:

        >>> TextRows(10, [(2, 2), (3, 0)]).positions(0, 3, 0, 2).tolist()
        [[2, 3], [4, 7], [8, 9]]
    """

    def __init__(self, num_pairs: int, cuts: list[tuple[int, int]]) -> None:
        self._starts = torch.zeros(1, dtype=torch.int64)
        self._lengths = torch.tensor([num_pairs])
        for rows, taken in cuts[:-1]:
            self._drop(rows, taken)
        self.num_rows, self.taken = cuts[-1]
        total = int(self._lengths.sum())
        self.row_length, self.tail = divmod(total, self.num_rows)
        """Pairs of a row, and of the tail."""
        self._ends = self._lengths.cumsum(0)

    def positions(self, first_row: int, num_rows: int, begin: int, end: int) -> Tensor:
        """Return the text positions of pairs ``begin`` to ``end`` of rows, shape [rows, pairs]."""
        rows = torch.arange(first_row, first_row + num_rows)[:, None]
        return self._places(rows * self.row_length + torch.arange(begin, end))

    def tail_positions(self, first: int, count: int) -> Tensor:
        """Return the text positions of some of the tail's pairs, shape [count, 1]."""
        begin = self.num_rows * self.row_length + first
        return self._places(torch.arange(begin, begin + count)[:, None])

    def _places(self, left: Tensor) -> Tensor:
        pieces = torch.searchsorted(self._ends, left.contiguous(), right=True)
        return left - (self._ends - self._lengths)[pieces] + self._starts[pieces]

    def _drop(self, num_rows: int, taken: int) -> None:
        ends = self._lengths.cumsum(0)
        row_length, tail = divmod(int(ends[-1]), num_rows)
        # Of every row [taken, row_length) remains; rows are cut at the ends of pieces of the text.
        left = torch.arange(num_rows) * row_length
        begins = torch.cat((left + taken, torch.tensor([num_rows * row_length])))
        stops = torch.cat((left + row_length, torch.tensor([num_rows * row_length + tail])))
        borders = torch.cat((begins, stops, ends)).unique()
        pieces = torch.stack((borders[:-1], borders[1:]))
        row = torch.searchsorted(begins, pieces[0], right=True) - 1
        inside = (row >= 0) & (pieces[1] <= stops[row.clamp(min=0)])
        pieces = pieces[:, inside]
        source = torch.searchsorted(ends, pieces[0], right=True)
        self._starts = pieces[0] - (ends - self._lengths)[source] + self._starts[source]
        self._lengths = pieces[1] - pieces[0]
        self._join()

    def _join(self) -> None:
        """Merge adjacent pieces, so that there are at most as many as rows were cut."""
        if len(self._starts) < 2:
            return
        stops = self._starts + self._lengths
        first = torch.cat((torch.tensor([True]), self._starts[1:] != stops[:-1]))
        last = torch.cat((first[1:], torch.tensor([True])))
        self._starts = self._starts[first]
        self._lengths = stops[last] - self._starts


class AdaptiveBPTTIterator(ElasticLoop[tuple[Tensor, Tensor]]):
    """Inputs and targets for a language model, window by window, over the replicas of a job.

    Every token but the text's first is a target exactly once an epoch, over any stops, restarts and
    changes of replicas or batch size. A sample is a window of ``bptt_len`` tokens of one row. With
    accumulation steps, an iteration takes several consecutive windows of the same rows, so hidden
    states are carried on from batch to batch in either case.

    Example::

        loader = AdaptiveBPTTIterator(tokens, batch_size=64, bptt_len=35)
        for epoch in remaining_epochs_until(40):
            for inputs, targets in loader:
                if loader.is_fresh:
                    hidden = None  # the rows are new
                ...

    Args:
        tokens: The text, shape [num_tokens], integers.
        batch_size: Windows of one optimizer step over ALL replicas, which is also the number of
            rows; with autoscaling the initial one.
        bptt_len: Tokens of a window.

    Yields:
        Inputs and targets of this replica, both of shape [rows, tokens], batch first, as pipelines
        cut dimension 0. There are ``bptt_len`` tokens, fewer in the last window of the rows; the
        tail comes last, one token per row.

    Raises:
        ConfigurationError: An argument is out of range.
    """

    def __init__(self, tokens: Tensor, batch_size: int, bptt_len: int) -> None:
        if tokens.dim() != 1 or tokens.is_floating_point() or len(tokens) < 2:
            raise ConfigurationError(
                f"tokens of shape {tuple(tokens.shape)} and type {tokens.dtype}: one dimension of "
                "at least two integers is needed"
            )
        if isinstance(bptt_len, bool) or not isinstance(bptt_len, int) or bptt_len < 1:
            raise ConfigurationError(
                f"bptt_len={bptt_len!r}: a whole number of at least 1 is needed"
            )
        self.tokens = tokens
        self.bptt_len = bptt_len
        self._is_fresh = False
        self._prepare(batch_size, {"tokens": len(tokens), "bptt_len": bptt_len})

    @property
    def is_fresh(self) -> bool:
        """Whether the rows begin with this batch, so that hidden states start from zero."""
        return self._is_fresh

    def __len__(self) -> int:
        """Return this replica's number of batches in a whole epoch at the current batch size."""
        rows = TextRows(len(self.tokens) - 1, [(self._num_rows(), 0)])
        return -(-rows.row_length // self.bptt_len) + (rows.tail > 0)

    def _segment(self) -> Iterator[tuple[BatchSlice, tuple[Tensor, Tensor]]]:
        rows = self._cut()
        self._is_fresh = True
        for part, positions in self._windows(rows):
            positions = positions.to(self.tokens.device)
            yield part, (self.tokens[positions], self.tokens[positions + 1])
            self._is_fresh = False

    def _windows(self, rows: TextRows) -> Iterator[tuple[BatchSlice, Tensor]]:
        shape, env = self._shape(), self._context.env
        sizes = split_evenly(rows.num_rows, env.num_replicas)
        mine = sizes[env.rank]
        first_row = min(sum(sizes[: env.rank]), rows.num_rows - 1)
        index, length = self._state.index, rows.row_length
        begin = rows.taken
        while begin < length:
            # Windows of one iteration have one length, so that all tokens have equal weight.
            full = min((length - begin) // self.bptt_len, shape.num_steps)
            width = self.bptt_len if full else length - begin
            index += rows.num_rows * width * max(full, 1)
            for step in range(max(full, 1)):
                positions = rows.positions(first_row, max(mine, 1), begin, begin + width)
                begin += width
                is_end = step == max(full, 1) - 1
                yield (
                    BatchSlice(
                        indices=range(first_row, first_row + max(mine, 1)),
                        num_samples=mine,
                        is_optimizer_step=is_end,
                        is_full=full == shape.num_steps,
                        next_index=index,
                        is_last=begin == length and not rows.tail,
                    ),
                    positions,
                )
        if rows.tail:
            self._is_fresh = True
            sizes = split_evenly(rows.tail, env.num_replicas)
            first, mine = sum(sizes[: env.rank]), sizes[env.rank]
            first = min(first, rows.tail - 1)
            part = BatchSlice(
                indices=range(first, first + max(mine, 1)),
                num_samples=mine,
                is_optimizer_step=True,
                is_full=False,
                next_index=index + rows.tail,
                is_last=True,
            )
            yield part, rows.tail_positions(first, max(mine, 1))

    def _cut(self) -> TextRows:
        cuts = [(rows, taken) for rows, taken in self._state.details.get("cuts", [])]
        num_rows = self._num_rows()
        if not cuts or cuts[-1][0] != num_rows:
            if cuts and cuts[-1][1] == 0:
                cuts.pop()
            cuts.append((num_rows, 0))
        self._state.details["cuts"] = cuts
        return TextRows(len(self.tokens) - 1, cuts)

    def _iteration_done(self, part: BatchSlice) -> None:
        *before, (num_rows, _) = self._state.details["cuts"]
        since = part.next_index - sum(rows * taken for rows, taken in before)
        self._state.details["cuts"] = [*before, (num_rows, since // num_rows)]

    def _num_rows(self) -> int:
        shape = self._shape()
        return shape.batch_size // shape.num_steps

    def _shape(self) -> BatchShape:
        """Return the batch shape; accumulation steps share all rows, so they divide the batch."""
        shape = super()._shape()
        rows = -(-shape.batch_size // shape.num_steps)
        return BatchShape(rows * shape.num_steps, shape.num_replicas, shape.accum_steps)
