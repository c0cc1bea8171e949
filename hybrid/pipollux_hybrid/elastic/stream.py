"""Samples of an iterable data set, divided among replicas.

A stream has no indices, so every replica reads all of it and keeps its share; any number of
replicas can continue from the number of samples taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from pipollux_hybrid.errors import CheckpointError, ConfigurationError
from pipollux_hybrid.job.batch import BatchShape, BatchSlice

from .sampler import parts_of_iteration
from .stream_check import Marks, marks_of

__all__ = ["PartCollate", "SampleStream"]


@dataclass(frozen=True)
class _Request:
    epoch: int
    index: int
    shape: BatchShape
    rank: int


class SampleStream(IterableDataset[tuple[BatchSlice, Marks, list[Any]]]):
    """The parts of one replica, with their samples.

    It is read in the training process or its worker. A whole batch of all replicas is held while
    its shares are yielded, as only its end shows whether it is the epoch's last.
    """

    def __init__(self, dataset: IterableDataset[Any]) -> None:
        self._dataset = dataset
        self._request: _Request | None = None
        self._reader: _Reader | None = None

    def begin(self, epoch: int, index: int, shape: BatchShape, rank: int) -> None:
        """Set epoch, position, batch shape and rank for the next iteration over this object."""
        self._request = _Request(epoch, index, shape, rank)

    def __iter__(self) -> Iterator[tuple[BatchSlice, Marks, list[Any]]]:
        """Yield parts from the set position on, with marks of the samples of all replicas."""
        request = self._request
        assert request is not None  # noqa: S101  # the loader calls begin first
        reader = self._reader_at(request.epoch, request.index)
        while True:
            index = reader.index
            samples = reader.take(request.shape.batch_size)
            is_last = reader.at_end
            marks = marks_of(samples) if request.shape.num_replicas > 1 else {}
            parts = parts_of_iteration(
                index, len(samples), request.shape, request.rank, is_last=is_last
            )
            for positions, part in parts:
                yield part, marks, samples[positions.start - index : positions.stop - index]
            if is_last:
                self._reader = None
                return

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def _reader_at(self, epoch: int, index: int) -> _Reader:
        """Return the open stream if it is at that position, else a new one."""
        if self._reader is None or (self._reader.epoch, self._reader.index) != (epoch, index):
            self._reader = _Reader(self._dataset, epoch, index)
        return self._reader


class _Reader:
    """A stream that is open at a position.

    ``epoch`` is passed to ``set_epoch`` if the data set has it; skipping ``index`` samples is cheap
    if it has ``skip``.
    """

    def __init__(self, dataset: IterableDataset[Any], epoch: int, index: int) -> None:
        self.epoch, self.index = epoch, index
        set_epoch, skip = (getattr(dataset, name, None) for name in ("set_epoch", "skip"))
        if set_epoch is not None:
            set_epoch(epoch)
        if index > 0 and skip is not None:
            self._samples: Iterator[Any] = iter(skip(index))
        else:
            self._samples = iter(dataset)
            next(itertools.islice(self._samples, index, index), None)
        self._ahead: list[Any] = []
        self._look_ahead()
        if self.at_end and index > 0:
            raise CheckpointError(
                f"the stream ends within {index} samples, but the last run took that many of epoch "
                f"{epoch}: {type(dataset).__name__} must give the same samples in every run"
            )
        if self.at_end:
            raise ConfigurationError("the data set is empty: there is nothing to train on")

    @property
    def at_end(self) -> bool:
        """Whether all samples were taken."""
        return not self._ahead

    def take(self, count: int) -> list[Any]:
        """Return the next ``count`` samples, or the rest."""
        samples = [*self._ahead, *itertools.islice(self._samples, count - len(self._ahead))]
        self.index += len(samples)
        self._look_ahead()
        return samples

    def _look_ahead(self) -> None:
        self._ahead = list(itertools.islice(self._samples, 1))


class PartCollate:
    """Collates the samples of a part with the loader's function, and passes the part on."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, item: tuple[BatchSlice, Marks, list[Any]]) -> tuple[BatchSlice, Marks, Any]:
        """Collate the samples."""
        part, marks, samples = item
        return part, marks, self._collate(samples)
