"""Function calls of a training step, in HybridParallel and in the plain loop or in DDP.

Unlike times they do not depend on the machine or on its load. Calls are those that
``sys.setprofile`` reports, of Python functions and of functions in C, per step: of the training
thread, and of torchgpipe's workers. The loader is included.

    .venv/bin/python benchmarks/overhead/calls.py
    .venv/bin/torchrun --nproc-per-node 2 benchmarks/overhead/calls.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from turns import OPTIMIZERS, SAMPLES, Shares

import pipollux
from pipollux_hybrid.job import context as contexts

BATCH, WIDTH, BLOCKS = 8, 16, 24
NOISE = range(8, 24)
"""Steps that measure the gradient's noise, once Adam's second moment has settled."""
QUIET = range(40, 64)
"""Steps that do not, nearly all of them; a tenth times the stages."""
Loop = Iterator[Tensor]


class Block(nn.Module):
    """Six parameters, [batch, WIDTH] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, WIDTH]."""
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


def layers() -> nn.Sequential:
    """24 blocks and a head: 146 parameters."""
    torch.manual_seed(1)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 4))


def samples() -> TensorDataset:
    """Return random samples."""
    return TensorDataset(torch.randn(SAMPLES, WIDTH), torch.randint(4, (SAMPLES,)))


class Counted:
    """Counts calls between two steps, by function."""

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = [Counter()]

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """See ``sys.setprofile``."""
        thread = threading.current_thread()
        if thread is not threading.main_thread() and not thread.name.endswith("(worker)"):
            return  # it does not work for the step
        if event == "call":
            code = frame.f_code
            self.steps[-1][f"{code.co_filename}:{code.co_qualname}"] += 1
        elif event == "c_call":
            owner = getattr(arg, "__module__", None) or type(arg.__self__).__name__
            self.steps[-1][f"{owner}.{arg.__qualname__}"] += 1

    def run(self, loop: Loop, num_steps: int) -> Counted:
        """Count the calls of steps."""
        for _ in range(num_steps):
            self.step(lambda: next(loop))
        return self

    def step(self, run: Callable[[], object]) -> None:
        """Count the calls of a step."""
        threading.setprofile(self)
        sys.setprofile(self)
        run()
        sys.setprofile(None)
        threading.setprofile(None)
        self.steps.append(Counter())

    def median(self, steps: range) -> float:
        """Return the median number of calls in a step."""
        return statistics.median(self.steps[step].total() for step in steps)

    def typical(self, steps: range) -> Counter[str]:
        """Return the calls of a step with the median number of calls."""
        return sorted((self.steps[step] for step in steps), key=Counter.total)[len(steps) // 2]

    def largest(self, steps: range, other: Counted) -> list[tuple[str, int]]:
        """Return the functions with more calls in a typical step than in another loop's, the most
        first.
        """
        more = self.typical(steps).copy()
        more.subtract(other.typical(steps))
        return more.most_common(100)


def steps(batches: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> Loop:
    """Yield after each step of the loop body."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        yield loss


def other(optimizer: str) -> Loop:
    """Return the plain loop, or DDP's."""
    module: nn.Module = layers()
    world = pipollux.num_replicas()
    stepper = OPTIMIZERS[optimizer](module.parameters())
    if world > 1:
        module = DistributedDataParallel(module)
    shares = Shares(world * BATCH, world, pipollux.replica_rank())
    return steps(iter(DataLoader(samples(), batch_sampler=shares)), module, stepper)


def ours(optimizer: str, **options: Any) -> Loop:
    """Return the loop with Pipollux."""
    world = pipollux.num_replicas()
    module = layers()
    stepper = OPTIMIZERS[optimizer](module.parameters())
    loader = pipollux.AdaptiveDataLoader(samples(), batch_size=world * BATCH, shuffle=True)
    model = pipollux.HybridParallel(module, stepper, **options)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in pipollux.remaining_epochs_until(1):
            yield from loader

    return steps(batches(), model, stepper)


def main() -> None:
    parser = argparse.ArgumentParser(description="Calls of a step.")
    parser.add_argument("--functions", action="store_true", help="print functions with most calls")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pipollux.init_process_group("gloo")
    say: Callable[..., None] = print if pipollux.replica_rank() == 0 else lambda *_: None
    name = "DDP" if pipollux.num_replicas() > 1 else "plain loop"
    say(f"| optimizer | loop | {name} | HybridParallel | adds | adds, measuring noise |")
    say("|---|---|---|---|---|---|")
    for optimizer in OPTIMIZERS:
        base = Counted().run(other(optimizer), QUIET.stop)
        for micro_batches in (1, 4):
            contexts.reset()  # a new job of the same replicas
            loop = ours(optimizer, num_microbatches=micro_batches)
            mine = Counted().run(loop, QUIET.stop)
            plain, quiet, noisy = base.median(QUIET), mine.median(QUIET), mine.median(NOISE)
            say(
                f"| {optimizer} | M = {micro_batches} | {plain:.0f} | {quiet:.0f} "
                f"| {quiet - plain:.0f} | {noisy - plain:.0f} |"
            )
            if args.functions:
                for steps_, word in ((QUIET, "quiet"), (NOISE, "noise")):
                    for function, count in mine.largest(steps_, base):
                        say(f"    {word} {count:8.1f}  {function[-90:]}")
    pipollux.destroy_process_group()


if __name__ == "__main__":
    main()
