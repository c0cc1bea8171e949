"""Function calls and processor time of a step with a process for each of two stages.

    .venv/bin/torchrun --standalone --nproc-per-node 2 benchmarks/engines/calls.py

1F1B of HybridParallel, and torch.distributed.pipelining by hand. Calls are those of the training
thread that ``sys.setprofile`` reports, of Python functions and of functions in C; unlike times they
do not depend on the machine or on its load. Processor time is that of the training thread, in
blocks of steps that take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from engines import CLASSES, MODELS, Block, Classify, by_hand, ours
from torch import nn
from torch.utils.data import TensorDataset

import pipollux
from pipollux_hybrid.job import context as contexts

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "overhead"))
from calls import NOISE, QUIET, Counted

Step = Callable[[int], None]


def narrow() -> tuple[list[nn.Module], TensorDataset]:
    """The transformer in small: the same layers and calls."""
    layers = [nn.Embedding(CLASSES, 16), *(Block(16) for _ in range(4)), Classify(16)]
    texts = torch.randint(CLASSES, (16, 8))
    return layers, TensorDataset(texts, texts[:, 0])


MODELS["narrow"] = (narrow, [3, 3])


def calls(name: str, micro_batches: int, functions: bool) -> list[str]:
    """Return the row of a number of micro-batches: by hand, HybridParallel, what it adds."""
    found = []
    arms = partial(by_hand, name, micro_batches), partial(ours, name, micro_batches, "1f1b", 1)
    for make in arms:
        contexts.reset()
        step, counted = make(), Counted()
        for _ in range(QUIET.stop):
            counted.step(partial(step, 1))
        found.append(counted)
    theirs, mine = found
    if functions:
        for steps, word in ((QUIET, "quiet"), (NOISE, "noise")):
            for function, number in mine.largest(steps, theirs):
                print(f"    {dist.get_rank()} {word} {number:8.1f}  {function[-90:]}")
    plain, quiet, noisy = theirs.median(QUIET), mine.median(QUIET), mine.median(NOISE)
    return [f"{x:.0f}" for x in (plain, quiet, quiet - plain, noisy - plain)]


def seconds(step: Step, number: int) -> float:
    """Return the processor time of a step of a block."""
    dist.barrier()
    begin = time.thread_time()
    step(number)
    return (time.thread_time() - begin) / number


def times(name: str, micro_batches: int, rounds: int, block: int) -> list[str]:
    """Return the processor time of a step in ms: by hand, HybridParallel, and its ratio."""
    contexts.reset()
    both = by_hand(name, micro_batches), ours(name, micro_batches, "1f1b", block)
    for _ in range(-(-QUIET.start // block)):  # past the steps that all measure the noise
        both[1](block)
    both[0](block)
    found = [tuple(seconds(step, block) for step in both) for _ in range(rounds)]
    low, middle, high = statistics.quantiles([b / a for a, b in found], n=4)
    theirs, mine = (1e3 * statistics.median(column) for column in zip(*found, strict=True))
    return [f"{theirs:.2f}", f"{mine:.2f}", f"{middle:.3f} ({low:.3f} to {high:.3f})"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="narrow")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--functions", action="store_true", help="print functions with most calls")
    parser.add_argument("--rounds", type=int, default=0, help="of processor time; 0: none")
    parser.add_argument("--block", type=int, default=4, help="steps of a block")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["PIPOLLUX_PROCESSES_PER_REPLICA"] = "2"  # of each new job
    pipollux.init_process_group("gloo")
    rows = [
        (m, calls(options.model, m, options.functions))
        + ((times(options.model, m, options.rounds, options.block),) if options.rounds else ())
        for m in options.microbatches
    ]
    gathered: list[object] = [None, None]
    dist.all_gather_object(gathered, rows)
    if dist.get_rank() == 0:
        columns = "stage | M | torch | 1f1b | adds | adds, measuring noise"
        columns += " | torch, CPU ms | 1f1b, CPU ms | ratio (quartiles)" if options.rounds else ""
        print(f"| {columns} |\n|{'---|' * (columns.count('|') + 1)}")
        for stage, found in enumerate(gathered):
            for m, *cells in found:
                print(f"| {stage} | {m} | {' | '.join(x for row in cells for x in row)} |")
    pipollux.destroy_process_group()


if __name__ == "__main__":
    main()
