"""Where a step's time goes with a process for each of two stages, against torch's own pipelining.

    .venv/bin/torchrun --standalone --nproc-per-node 2 benchmarks/engines/traces.py

1F1B of HybridParallel, and torch.distributed.pipelining by hand, both through torch's schedule: it
calls the same functions of a stage in both, which are timed here. Blocks of steps take turns. What
is in none of them is *other*: the loader, the optimizer, the gradients' scale, and Python around
all this; *other messages* are HybridParallel's headers, its loss for all stages, and its agreement
on the next step, with the waits for them. ``--trace FILE`` writes a block of each, one above the
other, for chrome://tracing or Perfetto.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from engines import MODELS, Steps, by_hand, ours
from torch.distributed.pipelining import PipelineStage, schedules

import pipollux
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.groups import ReplicaGroup
from pipollux_hybrid.pipeline.process_stage import ProcessStage

FUNCTIONS: dict[str, list[tuple[Any, str]]] = {
    "forward": [(PipelineStage, "forward_one_chunk"), (ProcessStage, "forward_one_chunk")],
    "backward": [(PipelineStage, "backward_one_chunk"), (ProcessStage, "backward_one_chunk")],
    "wait for tensors": [(schedules, "_wait_batch_p2p")],
    "send tensors": [(schedules, "_batch_p2p")],
    "other messages": [
        (ReplicaGroup, name) for name in ("all_reduce", "all_gather", "broadcast", "wait")
    ],
}
"""What is timed; of functions within each other, the outer one."""
MEASURED = 24
"""First steps of a job, which measure the gradient's noise."""


class Span(NamedTuple):
    """A piece of work of this process, in seconds of the host's clock."""

    work: str
    start: float
    end: float


class Spans:
    """The work of the stages of this process, in whichever loop."""

    def __init__(self) -> None:
        self.found: list[Span] = []
        self._inside = False
        for work, functions in FUNCTIONS.items():
            for owner, name in functions:
                setattr(owner, name, self._timed(work, getattr(owner, name)))

    def _timed(self, work: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)
            self._inside, begin = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False
                self.found.append(Span(work, begin, time.perf_counter()))

        return timed

    def of(self, steps: Steps, count: int) -> list[Span]:
        """Return the work of a block, and the block itself."""
        dist.barrier()
        self.found.clear()
        begin = time.perf_counter()
        steps(count)
        return [*self.found, Span("step", begin, time.perf_counter())]


def milliseconds(spans: list[Span], count: int) -> dict[str, float]:
    """Return the time of each kind of work in a step of a block."""
    sums = dict.fromkeys((*FUNCTIONS, "step"), 0.0)
    for span in spans:
        sums[span.work] += 1e3 * (span.end - span.start) / count
    sums["other"] = sums["step"] - sum(sums[work] for work in FUNCTIONS)
    return sums


def _times(span: Span, first: float) -> dict[str, float]:
    return {"ts": 1e6 * (span.start - first), "dur": 1e6 * (span.end - span.start)}


def chrome(blocks: dict[str, list[list[Span]]]) -> dict[str, Any]:
    """Return a trace with a row for each loop and stage, each loop from its own beginning."""
    events: list[dict[str, Any]] = []
    for row, (loop, stages) in enumerate(blocks.items()):
        events.append({"ph": "M", "name": "process_name", "pid": row, "args": {"name": loop}})
        first = min(span.start for spans in stages for span in spans)
        events += [
            {"ph": "X", "name": span.work, "pid": row, "tid": stage, **_times(span, first)}
            for stage, spans in enumerate(stages)
            for span in spans
        ]
    return {"traceEvents": events}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="transformer")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--count", type=int, default=4, help="steps of a block")
    parser.add_argument("--trace", type=Path, help="write a step of each to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["PIPOLLUX_PROCESSES_PER_REPLICA"] = "2"
    pipollux.init_process_group("gloo")
    contexts.reset()
    loops = {
        "torch": by_hand(options.model, options.microbatches),
        "1f1b": ours(options.model, options.microbatches, "1f1b", options.count),
    }
    for steps in loops.values():
        for _ in range(-(-MEASURED // options.count) if steps is loops["1f1b"] else 1):
            steps(options.count)
    spans = Spans()
    blocks: dict[str, list[dict[str, float]]] = {loop: [] for loop in loops}
    for _ in range(options.rounds):
        for loop, steps in loops.items():
            blocks[loop].append(milliseconds(spans.of(steps, options.count), options.count))
    if options.trace is not None:
        write(
            options.trace, {loop: spans.of(steps, options.count) for loop, steps in loops.items()}
        )
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, blocks)
    if dist.get_rank() == 0:
        show(gathered)
    pipollux.destroy_process_group()


def write(path: Path, mine: dict[str, list[Span]]) -> None:
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, mine)
    if dist.get_rank() == 0:
        both = {loop: [stage[loop] for stage in gathered] for loop in mine}
        path.write_text(json.dumps(chrome(both)))


def show(stages: list[dict[str, list[dict[str, float]]]]) -> None:
    print("| stage | part of a step | torch, ms | 1f1b, ms | adds, ms (quartiles) |")
    print("|---|---|---|---|---|")
    for stage, blocks in enumerate(stages):
        for work in (*FUNCTIONS, "other", "step"):
            theirs, mine = ([block[work] for block in blocks[loop]] for loop in ("torch", "1f1b"))
            adds = [b - a for a, b in zip(theirs, mine, strict=True)]
            low, middle, high = statistics.quantiles(adds, n=4)
            cells = (statistics.median(theirs), statistics.median(mine))
            row = f"{cells[0]:.1f} | {cells[1]:.1f} | {middle:+.1f} ({low:+.1f} to {high:+.1f})"
            print(f"| {stage} | {work} | {row} |")


if __name__ == "__main__":
    main()
