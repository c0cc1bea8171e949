"""Step time of per-stage gradient synchronization, of DDP over GPipe, and of no overlap.

Two pipeline replicas, each a process of one thread that drives four stages on the CPU. All variants
run in the same two processes and take turns, so that other load affects all alike. The fastest step
of each is the least disturbed one.

A link slower than loopback needs root: the script creates two network namespaces joined by a veth
pair, limited to ``--rate`` megabits a second (tc, token bucket filter), and removes them at the
end.

    sudo .venv/bin/python benchmarks/allreduce-overlap/allreduce_overlap.py --rate 1000
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchgpipe import GPipe

import pipollux
from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.job.context import context

WIDTH, STAGES, MICROBATCHES, ROWS = 640, 4, 4, 256
DEVICES = ["cpu"] * STAGES
NAMES = ("pipollux-a", "pipollux-b")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 29617

Step = Callable[[], None]


class Block(nn.Module):
    """The feed-forward half of a transformer block, 8 WIDTH² parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, WIDTH] to the same."""
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(STAGES)))


def inputs(rank: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def ours(batch: Tensor, checkpoint: str, *, overlap: bool = True, **options: Any) -> Step:
    """HybridParallel; without overlap nothing is sent before the backward has ended."""
    module = layers()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    context().component(States).clear()  # a job has one model; here each variant is a separate job
    model = pipollux.HybridParallel(
        module,
        optimizer,
        balance=[1] * STAGES,
        devices=DEVICES,
        num_microbatches=MICROBATCHES,
        activation_checkpoint=checkpoint,
        **options,
    )
    model._synchronizer._reducer.overlap = overlap
    return step_of(model, optimizer, batch)


def ddp(batch: Tensor, bucket_cap_mb: int) -> Step:
    """DistributedDataParallel over torchgpipe, which only works without recomputation."""
    module = layers()
    gpipe = GPipe(module, [1] * STAGES, devices=DEVICES, chunks=MICROBATCHES, checkpoint="never")
    model = DistributedDataParallel(gpipe, bucket_cap_mb=bucket_cap_mb)
    return step_of(model, torch.optim.SGD(module.parameters(), lr=1e-3), batch)


def alone(batch: Tensor, checkpoint: str) -> Step:
    """The pipeline without data parallelism: the step time if all communication is hidden."""
    module = layers()
    model = GPipe(module, [1] * STAGES, devices=DEVICES, chunks=MICROBATCHES, checkpoint=checkpoint)
    return step_of(model, torch.optim.SGD(module.parameters(), lr=1e-3), batch)


def contestants(batch: Tensor, checkpoint: str) -> dict[str, Step]:
    found = {"no synchronization": alone(batch, checkpoint)}
    if checkpoint == "never":
        found["DDP over GPipe, 25 MiB buckets (its default)"] = ddp(batch, 25)
        found["DDP over GPipe, 4 MiB buckets"] = ddp(batch, 4)
    found["HybridParallel, no overlap"] = ours(batch, checkpoint, overlap=False)
    found["HybridParallel, 25 MiB buckets (default)"] = ours(batch, checkpoint)
    found["HybridParallel, 4 MiB buckets"] = ours(batch, checkpoint, bucket_bytes=4 * 2**20)
    found["HybridParallel, bfloat16"] = ours(batch, checkpoint, reduce_dtype=torch.bfloat16)
    return found


def worker(checkpoint: str, turns: int) -> None:
    pipollux.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = pipollux.replica_rank()
    steps = contestants(inputs(rank), checkpoint)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 2):
        for name, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            dist.barrier()
            if turn >= 2:
                times[name].append(time.perf_counter() - started)
    if rank == 0:
        report(times)


def report(times: dict[str, list[float]]) -> None:
    reference = times["HybridParallel, no overlap"]
    print(
        "| contestant | fastest step | median step | over no overlap: fastest | median of turns |"
    )
    print("|---|---|---|---|---|")
    for name, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, reference, strict=True))
        fastest, median = min(seconds), statistics.median(seconds)
        print(
            f"| {name} | {1e3 * fastest:.0f} ms | {1e3 * median:.0f} ms | "
            f"{fastest / min(reference):.2f} | {ratio:.2f} |",
            flush=True,
        )


@contextmanager
def slow_link(megabits: float) -> Iterator[None]:
    """Two namespaces joined by a veth pair with a token bucket at either end."""

    def run(*words: str) -> None:
        subprocess.run(words, check=True)

    try:
        for name in NAMES:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "veth0", "netns", NAMES[0], "type", "veth",
            "peer", "name", "veth0", "netns", NAMES[1])  # fmt: skip
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "veth0")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "veth0", "up")
            run("tc", "-n", name, "qdisc", "add", "dev", "veth0", "root", "tbf",
                "rate", f"{megabits}mbit", "burst", "256kb", "latency", "50ms")  # fmt: skip
        yield
    finally:
        for name in NAMES:
            subprocess.run(("ip", "netns", "del", name), check=False)


def launch(args: argparse.Namespace, *, namespaces: bool) -> None:
    processes = []
    for rank in (0, 1):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": ADDRESSES[0] if namespaces else "127.0.0.1",
            "MASTER_PORT": str(PORT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "veth0" if namespaces else "lo",
        }
        command = [sys.executable, __file__, "--worker"]
        command += ["--checkpoint", args.checkpoint, "--turns", str(args.turns)]
        if namespaces:
            command[:0] = ["ip", "netns", "exec", NAMES[rank]]
        processes.append(subprocess.Popen(command, env=environment))
    try:
        codes = [process.wait(timeout=3600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        sys.exit(f"the replicas ended with {codes}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Overlap of gradient synchronization.")
    parser.add_argument("--rate", type=float, default=0, help="Mbit/s of the link; 0: loopback")
    parser.add_argument("--checkpoint", choices=["never", "except_last"], default="never")
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.checkpoint, args.turns)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes the namespaces
    if args.rate:
        if os.geteuid() != 0:
            parser.error("--rate needs root, to make network namespaces; leave it out for loopback")
        with slow_link(args.rate):
            launch(args, namespaces=True)
    else:
        launch(args, namespaces=False)


if __name__ == "__main__":
    main()
