"""A character-level transformer that learns to write Python, as a pipeline of two stages.

The text is the source code of Python's standard library, which every machine with Python has. Run
it by itself, with a process for each stage, on several pipeline replicas, or under the scheduler:
the script is the same.

    python examples/char_lm.py
    torchrun --nproc-per-node 2 examples/char_lm.py --processes-per-replica 2
    torchrun --nproc-per-node 2 examples/char_lm.py
    pipollux submit examples/demo-jobs.yaml

With `PIPOLLUX_TENSORBOARD_DIR=runs` in front, TensorBoard shows loss, goodput and batch size.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

import pipollux

VOCABULARY = 128  # ASCII


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Stretches of text, each with the text one character on as its target."""

    def __init__(self, text: bytes, length: int) -> None:
        self.codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.length = length

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        window = self.codes[start : start + self.length + 1]
        return window[:-1], window[1:]


class Embedding(nn.Module):
    """Characters and their positions as vectors: [batch, length] to [batch, length, width]."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, codes: Tensor) -> Tensor:
        vectors: Tensor = self.characters(codes) + self.positions
        return vectors


class Block(nn.Module):
    """Self-attention and a feed-forward layer, [batch, length, width] to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(self.attention_norm(x))
        query, key, value = heads.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        output: Tensor = x + self.feed_forward(x)
        return output


def standard_library(num_characters: int) -> bytes:
    """The first characters of the standard library's modules, in the order of their names."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)
    return bytes(code for code in text if code < VOCABULARY)[:num_characters]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--stages", type=int, default=2, help="stages of a replica")
    parser.add_argument("--processes-per-replica", type=int, help="1, or one for each stage")
    parser.add_argument("--microbatches", type=int, help="left out: chosen by goodput")
    parser.add_argument("--batch-size", type=int, default=32, help="initial, over all replicas")
    parser.add_argument("--max-batch-size", type=int, default=256)
    parser.add_argument("--characters", type=int, default=300_000, help="of text to train on")
    parser.add_argument("--length", type=int, default=64, help="of a training sequence")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    pipollux.init_process_group(processes_per_replica=args.processes_per_replica)
    torch.manual_seed(0)

    module = nn.Sequential(
        Embedding(args.length, args.width),
        *(Block(args.width, heads=4) for _ in range(args.layers)),
        nn.LayerNorm(args.width),
        nn.Linear(args.width, VOCABULARY),
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)

    windows = Windows(standard_library(args.characters), args.length)
    num_train = len(windows) - len(windows) // 20
    train_set = Subset(windows, range(num_train))
    held_out = Subset(windows, range(num_train, len(windows)))
    loader = pipollux.AdaptiveDataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    loader.autoscale_batch_size(
        args.max_batch_size, local_bsz_bounds=(8, 64), gradient_accumulation=True
    )
    held_out_loader = pipollux.AdaptiveDataLoader(held_out, batch_size=args.batch_size)
    sums = pipollux.Accumulator()
    model = pipollux.HybridParallel(
        module,
        optimizer,
        num_stages=args.stages,
        num_microbatches=args.microbatches,
        example_inputs=torch.zeros(8, args.length, dtype=torch.long),
        lr_scheduler=warm_up,
    )

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.to(logits.device).flatten())

    for epoch in pipollux.remaining_epochs_until(args.epochs):
        model.train()
        for codes, targets in loader:
            optimizer.zero_grad()
            loss = model.train_step(codes, targets, loss_of)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            warm_up.step()
            pipollux.report(loss=loss)

        model.eval()
        with torch.no_grad():
            for codes, targets in held_out_loader:
                sums["loss"] += loss_of(model(codes), targets) * len(codes)
                sums["windows"] += len(codes)
        with sums.synchronized():
            mean = float(sums["loss"] / sums["windows"])
            sums.clear()
        if pipollux.process_rank() == 0:
            print(f"epoch {epoch}: loss {mean:.3f} on held-out text", flush=True)


if __name__ == "__main__":
    main()
