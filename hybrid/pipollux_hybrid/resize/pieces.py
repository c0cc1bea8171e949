"""Tensors in pieces, which replicas send each other: who sends which, and where they lie.

Every replica that has the tensors sends a part of them. Each piece goes to one of those that
receive them, which hands it on to the others, so that nobody who has them sends anything twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .skeleton import is_dense

__all__ = ["Memory", "Piece", "Route", "Slice", "make_plan"]

SMALLEST = 1 << 20
LARGEST = 16 << 20
"""Bytes of a piece: many pieces share the work well, few cost little."""
PIECES_EACH = 4
"""Of each that sends to each that receives, where there is enough."""


class Route(NamedTuple):
    """Who sends to whom, by ranks."""

    senders: tuple[int, ...]
    """The first leads: it sends what others do not have, too."""
    receivers: tuple[int, ...]


class Slice(NamedTuple):
    """Some bytes of a tensor."""

    number: int
    """Of the tensor."""
    begin: int
    end: int


class Piece(NamedTuple):
    """What is sent at once."""

    slices: tuple[Slice, ...]
    source: int
    """Rank of the replica that sends it."""
    owner: int
    """Rank of the replica that receives it, and hands it on."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(end - begin for _, begin, end in self.slices)


def make_plan(sizes: Sequence[int], equal: Sequence[bool], route: Route) -> list[Piece]:
    """Return who sends which bytes to whom: pieces in an order that all replicas keep to.

    Args:
        sizes: Bytes of the tensors.
        equal: For each, whether all senders have it; else the first one sends it.
        route: Who sends to whom.
    """
    senders, receivers = route
    shares = PIECES_EACH * len(senders) * len(receivers)
    most = min(max(sum(sizes) // shares, SMALLEST), LARGEST)
    pieces: list[Piece] = []
    for shared in (True, False):
        numbers = [number for number, value in enumerate(equal) if value == shared]
        for slices in _cut({number: sizes[number] for number in numbers}, most):
            turn, index = divmod(len(pieces), len(senders))
            source = senders[index if shared else 0]
            pieces.append(Piece(tuple(slices), source, receivers[turn % len(receivers)]))
    return pieces


def _cut(sizes: dict[int, int], most: int) -> list[list[Slice]]:
    """Return pieces of at most so many bytes: parts of one tensor, or several small ones."""
    pieces: list[list[Slice]] = []
    gathered: list[Slice] = []
    filled = 0
    for number, size in sizes.items():
        if size >= most // 4:
            pieces += [
                [Slice(number, begin, min(begin + most, size))] for begin in range(0, size, most)
            ]
            continue
        if filled + size > most:
            pieces.append(gathered)
            gathered, filled = [], 0
        gathered.append(Slice(number, 0, size))
        filled += size
    return [*pieces, gathered] if gathered else pieces


class Memory:
    """Tensors as bytes in the order in which they lie in memory, read and written slice by slice.

    Those on the CPU are used as they are. Slices of others are copied, and a whole tensor where it
    has gaps, one at a time: each is gone through from its beginning to its end.

    Args:
        tensors: The tensors; those to write to have no gaps.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._copy: tuple[int, Tensor] | None = None

    def read(self, piece: Piece) -> Tensor:
        """Return the bytes of a piece, uint8, shape [size]; the tensors' own where they can be."""
        parts = [self._read(part) for part in piece.slices]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def room(self, piece: Piece) -> Tensor:
        """Return where the bytes of a piece may be received, to be given to :meth:`write`."""
        if self._is_direct(piece):
            return self._read(piece.slices[0])
        return torch.empty(piece.size, dtype=torch.uint8)

    def write(self, piece: Piece, content: Tensor) -> None:
        """Put the bytes of a piece, which has been received, where they belong."""
        if self._is_direct(piece):
            return
        sizes = [end - begin for _, begin, end in piece.slices]
        for part, received in zip(piece.slices, content.split(sizes), strict=True):
            _bytes(self._tensors[part.number])[part.begin : part.end].copy_(received)

    def _is_direct(self, piece: Piece) -> bool:
        number = piece.slices[0].number
        return len(piece.slices) == 1 and self._tensors[number].device.type == "cpu"

    def _read(self, part: Slice) -> Tensor:
        number, begin, end = part
        tensor = self._tensors[number]
        if is_dense(tensor):
            return _bytes(tensor)[begin:end].cpu()
        if self._copy is None or self._copy[0] != number:
            self._copy = number, tensor.contiguous()
        return _bytes(self._copy[1])[begin:end].cpu()


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor without gaps as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
