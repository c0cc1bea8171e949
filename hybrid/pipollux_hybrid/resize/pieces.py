"""Splits tensors into pieces for a transfer: the plan of senders and receivers, and the memory.

Every replica that has the tensors sends a part of them. Each piece goes to one receiver, which
forwards it to the other receivers, so that no replica sends anything twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .skeleton import is_dense

SMALLEST = 1 << 20
LARGEST = 16 << 20
"""Maximum bytes of a piece: many pieces balance the work, few cost little."""
PIECES_EACH = 4
"""Pieces per sender and receiver, if there is enough data."""


class Route(NamedTuple):
    """The ranks of senders and receivers."""

    senders: tuple[int, ...]
    """The first one leads: it also sends tensors that the others do not have."""
    receivers: tuple[int, ...]


class Slice(NamedTuple):
    """A range of bytes of a tensor."""

    number: int
    begin: int
    end: int


class Piece(NamedTuple):
    """The content of one message."""

    slices: tuple[Slice, ...]
    source: int
    owner: int
    """Rank of the replica that receives and forwards it."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return sum(end - begin for _, begin, end in self.slices)


def make_plan(sizes: Sequence[int], equal: Sequence[bool], route: Route) -> list[Piece]:
    """Return the pieces in the order in which all replicas send and receive them. ``sizes`` are in
    bytes; a tensor that is not ``equal`` on all senders is sent by the first one.
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
    """Return pieces of at most ``most`` bytes: parts of one tensor, or several small tensors."""
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
    """Tensors as bytes in memory order, read and written slice by slice.

    Tensors on the CPU are used directly. Slices of others are copied, through pinned memory where a
    GPU copies; of a tensor with gaps the whole is copied, one tensor at a time, so each must be
    read from its beginning to its end. Tensors that are written must not have gaps.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._copy: tuple[int, Tensor] | None = None

    def read(self, piece: Piece) -> Tensor:
        """Return the bytes of a piece, uint8, shape [size]; without a copy where possible."""
        if self._is_direct(piece):
            return self._read(piece.slices[0])
        content = self._buffer(piece)
        for part, room in zip(piece.slices, _split(piece, content), strict=True):
            room.copy_(self._read(part))
        return content

    def room(self, piece: Piece) -> Tensor:
        """Return a buffer to receive a piece, to be passed to :meth:`write`."""
        if self._is_direct(piece):
            return self._read(piece.slices[0])
        return self._buffer(piece)

    def write(self, piece: Piece, content: Tensor) -> None:
        """Write a received piece to its tensors."""
        if self._is_direct(piece):
            return
        for part, received in zip(piece.slices, _split(piece, content), strict=True):
            _bytes(self._tensors[part.number])[part.begin : part.end].copy_(received)

    def _buffer(self, piece: Piece) -> Tensor:
        # Torch keeps pinned memory, and so a few buffers serve a whole transfer.
        pinned = any(self._tensors[part.number].is_cuda for part in piece.slices)
        return torch.empty(piece.size, dtype=torch.uint8, pin_memory=pinned)

    def _is_direct(self, piece: Piece) -> bool:
        number = piece.slices[0].number
        return len(piece.slices) == 1 and self._tensors[number].device.type == "cpu"

    def _read(self, part: Slice) -> Tensor:
        number, begin, end = part
        tensor = self._tensors[number]
        if is_dense(tensor):
            return _bytes(tensor)[begin:end]
        if self._copy is None or self._copy[0] != number:
            self._copy = number, tensor.contiguous()
        return _bytes(self._copy[1])[begin:end]


def _split(piece: Piece, content: Tensor) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = content.split([end - begin for _, begin, end in piece.slices])
    return parts


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor without gaps in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
