"""Saving and restoring a large model: at a step boundary, in the background, and on the bare disk.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/checkpoint/checkpoint.py

All variants take turns in each round, so that other load affects all alike.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import pipollux
from pipollux_hybrid.checkpoint.manager import CheckpointManager
from pipollux_hybrid.job import context as contexts

WIDTH = 4096


def layers(gib: float) -> nn.Sequential:
    """Square layers of 64 MiB each, `gib` GiB of float32 parameters in total."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(round(16 * gib))))


def job(gib: float) -> tuple[nn.Sequential, torch.optim.Adam]:
    """A new model and its optimizer; restores an existing checkpoint."""
    contexts.reset()
    module = layers(gib)
    optimizer = torch.optim.Adam(module.parameters())
    pipollux.HybridParallel(module, optimizer, num_stages=2)
    return module, optimizer


def fill(module: nn.Module, optimizer: torch.optim.Adam) -> None:
    for parameter in module.parameters():
        moments = {name: torch.randn_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.ones(()), **moments}


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def forget(path: Path) -> None:
    """Drop a file from the kernel's cache, so that reading it reads from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def write_bytes(path: Path, size: int) -> None:
    """Write one block repeatedly, then flush once, like dd."""
    block = os.urandom(1 << 24)
    with path.open("wb", buffering=0) as file:
        for _ in range(size // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    path.unlink()


def plain_save(content: object, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def one_round(gib: float, root: Path, times: dict[str, list[float]]) -> int:
    os.environ["PIPOLLUX_CHECKPOINT_DIR"] = str(root / "checkpoints")
    size = save(gib, root, times)
    contexts.reset()
    gc.collect()
    restore(gib, root, root / "plain.pt", times)
    (root / "plain.pt").unlink()
    shutil.rmtree(root / "checkpoints")
    return size


def save(gib: float, root: Path, times: dict[str, list[float]]) -> int:
    module, optimizer = job(gib)
    fill(module, optimizer)
    content = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
    plain = root / "plain.pt"
    times["torch.save and fsync"].append(seconds(lambda: plain_save(content, plain)))
    size = plain.stat().st_size
    times["the same bytes, written and flushed"].append(
        seconds(lambda: write_bytes(root / "bytes", size))
    )
    times["save at a step boundary"].append(seconds(pipollux.save_all_states))
    saving = contexts.context().component(CheckpointManager).saver
    for name in ("first", "later"):
        pause = seconds(lambda: pipollux.save_all_states(background=True))
        times[f"background save: pause, {name}"].append(pause)
        times[f"background save: whole, {name}"].append(pause + seconds(saving.wait))
    return size


def restore(gib: float, root: Path, plain: Path, times: dict[str, list[float]]) -> None:
    newest = max((root / "checkpoints").glob("checkpoint-*")) / "model.pt"
    for cache in ("disk", "cache"):
        if cache == "disk":
            forget(plain)
        name = f"torch.load, from {cache}"
        times[name].append(seconds(lambda: torch.load(plain, weights_only=True)))
        gc.collect()
        if cache == "disk":
            forget(newest)
        module = layers(gib)
        optimizer = torch.optim.Adam(module.parameters())
        contexts.reset()
        wrapped = seconds(lambda m=module, o=optimizer: pipollux.HybridParallel(m, o, num_stages=2))
        times[f"restore with checksum, from {cache}"].append(wrapped)
        del module, optimizer
        contexts.reset()
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds to save and restore a model.")
    parser.add_argument("--gib", type=float, default=1.0, help="GiB of parameters")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    times: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix=".checkpoint-benchmark-", dir=Path.cwd()) as directory:
        for _ in range(args.rounds):
            size = one_round(args.gib, Path(directory), times)
    print(f"{args.gib:g} GiB of parameters, {size / 2**30:.2f} GiB in all with Adam's moments")
    for name, values in times.items():
        middle = statistics.median(values)
        print(
            f"{name:36} {middle:6.2f} s ({min(values):.2f} to {max(values):.2f})   "
            f"{size / 2**30 / middle:5.2f} GiB/s"
        )


if __name__ == "__main__":
    main()
