"""Step times of real HybridParallel runs over K stages, R replicas, M micro-batches of b samples.

Each (K, R) is a job of R processes with torchrun's variables. All jobs are started at once and then
take turns, a round of all (M, b) each, so that other load affects all alike. The output is the
library's own measurements: medians in `StepProfile`, to which the performance model is fitted
inside a job.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/pipeline-accuracy/measure.py --output rows.jsonl

`accuracy.py` reads the file. A line is a configuration or, with `"kind": "layer"`, the separately
measured times of a layer. Seconds throughout; `forward` and `backward` are per stage and
micro-batch, means over the micro-batches of a step, as by the stage timers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import pipollux
from pipollux_hybrid import parallel
from pipollux_hybrid.job.context import context
from pipollux_hybrid.optim import noise_meter
from pipollux_hybrid.pipeline import engine
from pipollux_hybrid.telemetry import stage_profiler
from pipollux_hybrid.telemetry.metrics import Metrics

TOKENS, WIDTH, CLASSES = 12, 128, 32
HIDDEN = (2, 4, 4, 2, 3, 3, 2, 4)  # of WIDTH, one per block: layers differ
ITERATIONS = ((0, 4), (1, 2), (2, 1))  # (accumulation steps, iterations) of a configuration's turn
SETTLED = noise_meter.MEASURED_AT_FIRST + 2  # iterations until the noise is measured rarely
TIMED_EVERY = 5  # iterations from one timing of stages to the next; 10 in a job
# Seconds of an iteration, loader included, by (M, atomic batch size) and accumulation steps.
Walls = dict[tuple[int, int], dict[int, list[float]]]


class Block(nn.Module):
    """A transformer's feed-forward half; keeps the shape [batch, tokens, width]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the two layers to x."""
        output: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return output


class Repeated(Dataset[tuple[Tensor, Tensor]]):
    """A few random samples, repeated to any length."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._inputs = torch.randn(64, TOKENS, WIDTH, generator=generator)
        self._targets = torch.randint(CLASSES, (64, TOKENS), generator=generator)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= self._length:
            raise IndexError(index)
        return self._inputs[index % 64], self._targets[index % 64]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(WIDTH, hidden * WIDTH) for hidden in HIDDEN]
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, head)


# --- one replica ---------------------------------------------------------------------------------


class Steps:
    """Every step in the library's profile, with additional data."""

    def __init__(self, model: parallel.HybridParallel) -> None:
        self.steps: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        self.accum_steps = 0
        """Accumulation steps of the iterations under way."""
        self._model = model
        profile = context().component(Metrics).profile
        self._add_step, self._add_stages = profile.add_step, profile.add_stages
        self._timed = False
        profile.add_step = self._step  # continue the measurement
        profile.add_stages = self._stages

    def _stages(self, *arguments: Any) -> None:
        self._timed = True
        self._add_stages(*arguments)

    def _step(
        self, configuration: Any, step: float, sync: float, exchange: float, **how: bool
    ) -> None:
        self._add_step(configuration, step, sync, exchange, **how)
        optimizer = how["optimizer"]
        # The model has already counted an optimizer step.
        number = self._model._noise._steps - optimizer
        self.steps[configuration.num_microbatches, configuration.atomic_bsz].append(
            {
                "accum_steps": self.accum_steps,
                "step": step,
                "sync": sync,
                "optimizer": optimizer,
                "noise": number % noise_meter.MEASURED_EVERY == 0,
                "timed": self._timed,
            }
        )
        self._timed = False


class Replica:
    """One process of a job: trains through all (M, b) of a round on request."""

    def __init__(self, num_stages: int, grid: Sequence[tuple[int, int]], checkpoint: str) -> None:
        pipollux.init_process_group(timeout=300)
        stage_profiler.TIMED_EVERY = TIMED_EVERY
        module = layers()
        self._optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
        self._model = pipollux.HybridParallel(
            module, self._optimizer, num_stages=num_stages, activation_checkpoint=checkpoint
        )
        self._grid, self._checkpoint, self._recorder = list(grid), checkpoint, Steps(self._model)
        self._walls: Walls = defaultdict(lambda: defaultdict(list))
        self._layers: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)

    def settle(self) -> None:
        """Train until the library measures as rarely as later on."""
        for num_microbatches, micro_bsz in self._grid:
            self._train(num_microbatches, micro_bsz, accum_steps=0, iterations=1)
        self._train(*self._grid[0], accum_steps=0, iterations=SETTLED)
        self._walls.clear()
        self._recorder.steps.clear()
        context().component(Metrics).profile._measurements.clear()

    def round(self, seed: int) -> None:
        """Train in every configuration, in a random order per round."""
        order = random.Random(seed).sample(self._grid, len(self._grid))  # noqa: S311  # an order that can be repeated, not a secret
        for num_microbatches, micro_bsz in order:
            for accum_steps, iterations in ITERATIONS:
                self._train(num_microbatches, micro_bsz, accum_steps, iterations)

    def time_layers(self) -> None:
        """Time each layer separately, in this process, on one micro-batch of each size."""
        for micro_bsz in sorted({b for _, b in self._grid}):
            batch = torch.randn(micro_bsz, TOKENS, WIDTH)
            for index, layer in enumerate(layers()):
                for _ in range(4):
                    *seconds, output = _time_layer(layer, batch)
                    self._layers[index, micro_bsz].append((seconds[0], seconds[1]))
                batch = output

    def rows(self) -> Iterator[dict[str, Any]]:
        """Measurements, one row per configuration and per layer."""
        profile = context().component(Metrics).profile
        for entry, summary in zip(profile.to_json(), profile.summaries().values(), strict=True):
            num_microbatches, atomic_bsz = entry["num_microbatches"], entry["atomic_bsz"]
            walls = self._walls[num_microbatches, atomic_bsz]
            yield {
                **{k: entry[k] for k in ("num_nodes", "num_replicas", "num_stages")},
                "num_microbatches": num_microbatches,
                "atomic_bsz": atomic_bsz,
                "accum_step_time": summary.accum,
                "optim_step_time": summary.optim,
                "forward": _medians(entry["forward"]),
                "backward": _medians(entry["backward"]),
                "checkpoint": self._checkpoint,
                "balance": self._model.balance,
                "num_samples": [
                    *(sum(map(len, entry[k])) for k in ("accum", "optim")),
                    len(entry["forward"]),
                ],
                "iterations": [
                    {"accum_steps": s, "seconds": statistics.median(walls[s])}
                    for s, _ in ITERATIONS
                ],
                "steps": self._recorder.steps[num_microbatches, atomic_bsz],
            }
        for (index, micro_bsz), times in self._layers.items():
            forward, backward = _medians(times)
            yield {
                "kind": "layer",
                "layer": index,
                "micro_bsz": micro_bsz,
                "forward": forward,
                "backward": backward,
                "parameter_bytes": sum(4 * p.numel() for p in layers()[index].parameters()),
            }

    def _train(
        self, num_microbatches: int, micro_bsz: int, accum_steps: int, iterations: int
    ) -> None:
        atomic_bsz = num_microbatches * micro_bsz
        batch_size = atomic_bsz * pipollux.num_replicas() * (accum_steps + 1)
        # Only one batch shape is within these bounds.
        loader = pipollux.AdaptiveDataLoader(Repeated(iterations * batch_size), batch_size)
        context().batch.limits = None  # the previous loader's: a job has one that grows
        loader.autoscale_batch_size(batch_size, (atomic_bsz, atomic_bsz), accum_steps > 0)
        self._model.num_microbatches = num_microbatches
        self._recorder.accum_steps = accum_steps
        started = time.perf_counter()
        for inputs, targets in loader:
            self._optimizer.zero_grad()
            outputs = self._model(inputs).flatten(0, 1)
            F.cross_entropy(outputs, targets.flatten()).backward()
            self._optimizer.step()
        seconds = (time.perf_counter() - started) / iterations
        self._walls[num_microbatches, atomic_bsz][accum_steps].append(seconds)


def _time_layer(layer: nn.Module, batch: Tensor) -> tuple[float, float, Tensor]:
    batch = batch.detach().requires_grad_()
    started = time.perf_counter()
    output = layer(batch)
    between = time.perf_counter()
    output.backward(torch.ones_like(output))
    return between - started, time.perf_counter() - between, output.detach()


def _medians(samples: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(times) for times in zip(*samples, strict=True)]


def run_replica(args: argparse.Namespace) -> None:
    """Carry out the commands on standard input; rank 0 confirms each."""
    replica = Replica(args.stages[0], grid(args), args.checkpoint)
    rank = pipollux.replica_rank()
    for line in sys.stdin:
        word, *number = line.split()
        if word == "settle":
            replica.settle()
        elif word == "layers" and rank == 0:
            replica.time_layers()
        elif word == "round":
            replica.round(int(number[0]))
        elif word == "rows" and rank == 0:
            for row in replica.rows():
                print(json.dumps(row), flush=True)
        if rank == 0:
            print("done", flush=True)


# --- all jobs ------------------------------------------------------------------------------------


class Job:
    """The processes of one (K, R)."""

    def __init__(self, num_stages: int, num_replicas: int, options: Sequence[str]) -> None:
        self.num_stages, self.num_replicas = num_stages, num_replicas
        command = [sys.executable, __file__, "--replica", "--stages", str(num_stages), *options]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the job
        self._processes = [
            subprocess.Popen(
                command,
                env=_environment(rank, num_replicas, port),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=self._log,
                text=True,
            )
            for rank in range(num_replicas)
        ]

    def tell(self, line: str) -> list[str]:
        """Send a command to all replicas; return the answer of rank 0."""
        try:
            for process in self._processes:
                assert process.stdin is not None  # noqa: S101  # a pipe
                process.stdin.write(line + "\n")
                process.stdin.flush()
        except BrokenPipeError:
            self._fail(line)
        answer = []
        assert self._processes[0].stdout is not None  # noqa: S101  # a pipe
        for text in self._processes[0].stdout:
            if text == "done\n":
                return answer
            answer.append(text)
        return self._fail(line)

    def _fail(self, line: str) -> list[str]:
        self._log.seek(0)
        name = f"K={self.num_stages} R={self.num_replicas}"
        log = "".join(self._log.readlines()[-20:])
        sys.exit(f"{name} ended in {line!r} (an error, or --timeout):\n{log}")

    def end(self) -> None:
        """Close the pipes, which ends the processes."""
        for process in self._processes:
            if process.stdin is not None and process.poll() is None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        """End the processes at once."""
        for process in self._processes:
            process.kill()


def _environment(rank: int, num_replicas: int, port: int) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PIPOLLUX_")}
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_replicas),
        "LOCAL_WORLD_SIZE": str(num_replicas),
        "OMP_NUM_THREADS": "1",
        "PIPOLLUX_HINTS_INTERVAL": "86400",  # no fits during the measurement
        # glibc keeps the memory of a step, as PyTorch does on GPUs, without new page faults.
        "MALLOC_TRIM_THRESHOLD_": "2000000000",
        "MALLOC_MMAP_THRESHOLD_": "2000000000",
    }
    if num_replicas > 1:
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return env


def grid(args: argparse.Namespace) -> list[tuple[int, int]]:
    return [(m, b) for m in args.microbatches for b in args.micro_bsz]


def parse_arguments() -> argparse.Namespace:
    numbers = {"type": int, "nargs": "+"}
    parser = argparse.ArgumentParser(description="Measure step times of HybridParallel.")
    parser.add_argument("--stages", default=[1, 2, 4], help="K", **numbers)
    parser.add_argument("--replicas", default=[1, 2], help="R", **numbers)
    parser.add_argument("--microbatches", default=[1, 2, 4, 8], help="M", **numbers)
    parser.add_argument("--micro-bsz", default=[4, 8, 16, 32], help="b", **numbers)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--checkpoint", choices=engine.CHECKPOINT_MODES, default="except_last")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--output", type=Path, default=Path("rows.jsonl"))
    parser.add_argument("--quick", action="store_true", help="one round of a small grid")
    parser.add_argument("--replica", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.microbatches, args.micro_bsz, args.rounds = [1, 2, 4], [4, 8], 1
    return args


def main() -> None:
    args = parse_arguments()
    if args.replica:
        run_replica(args)
        return
    started = time.perf_counter()
    options = ["--checkpoint", args.checkpoint, "--microbatches", *map(str, args.microbatches)]
    options += ["--micro-bsz", *map(str, args.micro_bsz)]
    jobs: list[Job] = []
    watchdog = threading.Timer(args.timeout, lambda: [job.kill() for job in jobs])
    watchdog.daemon = True
    watchdog.start()
    try:
        for num_stages in args.stages:
            jobs += [Job(num_stages, r, options) for r in args.replicas]
        rows = measure(jobs, args.rounds)
    finally:
        watchdog.cancel()
        for job in jobs:
            job.end()
    args.output.write_text("".join(rows))
    print(f"{len(rows)} rows in {args.output} after {time.perf_counter() - started:.0f} s")


def measure(jobs: Sequence[Job], rounds: int) -> list[str]:
    for job in jobs:
        job.tell("settle")
    for number in range(rounds):
        for index, job in enumerate(jobs):
            job.tell(f"round {number}")
            if index == 0:
                job.tell("layers")
    return [row for job in jobs for row in job.tell("rows")]


if __name__ == "__main__":
    main()
