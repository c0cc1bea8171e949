"""States of joining replicas that are on a GPU, and travel over gloo."""

from __future__ import annotations

import pytest
import torch

from pipollux_hybrid.resize.pieces import Memory, Piece, Slice

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "slices",
    [(Slice(0, 8, 4096),), (Slice(1, 0, 48),), (Slice(0, 0, 16), Slice(1, 0, 48), Slice(2, 0, 8))],
)
def test_pieces_pass_through_pinned_memory(slices: tuple[Slice, ...]) -> None:
    numbers = torch.arange(1024.0, device="cuda")
    tensors = [numbers, numbers.view(32, 32)[:3, 4:8], torch.arange(2.0)]
    targets = [torch.full_like(x, -1.0) for x in tensors]
    piece = Piece(slices, 0, 1)
    here, there = Memory(tensors), Memory(targets)
    content, room = here.read(piece), there.room(piece)
    assert content.is_pinned()
    assert room.is_pinned()
    room.copy_(content)
    there.write(piece, room)
    whole = [x.cpu().contiguous().view(torch.uint8).flatten() for x in tensors]
    for number, begin, end in slices:
        written = targets[number].cpu().contiguous().view(torch.uint8).flatten()
        assert torch.equal(written[begin:end], whole[number][begin:end])
