"""Memory of stages on a GPU: predicted from the layers' profile, and allocated.

    .venv/bin/python benchmarks/gpu/memory.py
    .venv/bin/torchrun --standalone --nproc-per-node 2 benchmarks/gpu/memory.py --processes

The prediction is `stage_memory`, which limits cuts and batches; the measurement is the peak of
torch's allocator over steps after the optimizer has created its state. Without --processes one
process drives all stages on one GPU, and the sum counts. With it each stage has its own process and
peak.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os

import torch
from model import SIZES, Size, data, layers, loss_of

import pipollux
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from pipollux_perfmodel import stage_memory

MODES = ("always", "except_last", "never")
STEPS = 4
COLUMNS = ["model", "K", "stage", "schedule", "M", "mode", "predicted, MiB"]
COLUMNS += ["measured, MiB", "ratio", "balance"]


def train(size: Size, stages: int, microbatches: int, mode: str, schedule: str | None) -> list[str]:
    """Return predicted and allocated MiB, and their ratio."""
    contexts.reset()
    gc.collect()
    torch.cuda.empty_cache()
    module, texts = layers(size), data(size, STEPS)
    optimizer = torch.optim.AdamW(module.parameters())
    model = pipollux.HybridParallel(
        module,
        optimizer,
        num_stages=stages,
        num_microbatches=microbatches,
        activation_checkpoint=mode,
        schedule=schedule,
        example_inputs=texts.tensors[0][: size.batch],
    )
    for step, (codes, targets) in enumerate(pipollux.AdaptiveDataLoader(texts, size.batch)):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        model.train_step(codes, targets, loss_of)
        optimizer.step()
    profile = model.layer_profile
    if profile is None:
        raise SystemExit("there is no profile of the layers")
    options = {"checkpoint": mode, "schedule": schedule or "gpipe"}
    stage_bytes = stage_memory(
        profile, model.balance, size.batch / microbatches, microbatches, **options
    )
    predicted = float(stage_bytes[context().env.stage] if schedule else stage_bytes.sum())
    measured = torch.cuda.max_memory_allocated()
    return [
        f"{predicted / 2**20:.0f}",
        f"{measured / 2**20:.0f}",
        f"{measured / predicted:.2f}",
        str(model.balance),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", action="store_true", help="one for each of two stages")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["medium"])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[1, 4])
    options = parser.parse_args()
    os.environ.setdefault("PIPOLLUX_DEVICES", "cuda:0,cuda:0")
    os.environ["PIPOLLUX_PROCESSES_PER_REPLICA"] = "2" if options.processes else "1"
    pipollux.init_process_group("gloo")
    if int(os.environ.get("RANK", "0")) == 0:
        columns = (
            "model | K | stage | schedule | M | mode | predicted, MiB | measured | ratio | cut"
        )
        print(f"| {columns} |\n|{'---|' * 10}", flush=True)
    schedules: tuple[str | None, ...] = ("1f1b", "gpipe") if options.processes else (None,)
    stages = (2,) if options.processes else (1, 2)
    cases = itertools.product(options.sizes, stages, schedules, options.microbatches, MODES)
    for name, num_stages, schedule, microbatches, mode in cases:
        row = train(SIZES[name], num_stages, microbatches, mode, schedule)
        where = context().env.stage if schedule else "all"
        cells = [name, num_stages, where, schedule or "torchgpipe", microbatches, mode, *row]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
