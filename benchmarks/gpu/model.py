"""The character transformer of `examples/char_lm.py` in several sizes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from char_lm import VOCABULARY, Block, Embedding

__all__ = ["SIZES", "Size", "data", "layers", "loss_of"]


@dataclass(frozen=True)
class Size:
    """A model, and a batch of texts."""

    width: int
    blocks: int
    length: int
    batch: int


SIZES = {
    "tiny": Size(width=32, blocks=4, length=16, batch=8),
    "small": Size(width=256, blocks=4, length=64, batch=32),
    "base": Size(width=512, blocks=6, length=128, batch=32),
    "medium": Size(width=1024, blocks=8, length=256, batch=32),
    "large": Size(width=2048, blocks=12, length=512, batch=32),
}
"""Of 0.1, 3, 19, 101 and 606 million parameters."""


def layers(size: Size) -> nn.Sequential:
    """Return the same layers at every call."""
    torch.manual_seed(0)
    blocks = [Block(size.width, heads=max(size.width // 64, 1)) for _ in range(size.blocks)]
    head = nn.Sequential(nn.LayerNorm(size.width), nn.Linear(size.width, VOCABULARY))
    return nn.Sequential(Embedding(size.length, size.width), *blocks, head)


def data(size: Size, num_batches: int) -> TensorDataset:
    """Return random texts, whose targets are the next characters."""
    generator = torch.Generator().manual_seed(1)
    shape = size.batch * num_batches, size.length + 1
    codes = torch.randint(VOCABULARY, shape, generator=generator)
    return TensorDataset(codes[:, :-1], codes[:, 1:])


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        output.flatten(0, 1), targets.to(output.device, non_blocking=True).flatten()
    )
