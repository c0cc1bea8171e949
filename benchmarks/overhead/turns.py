"""Two training loops that take turns, and the cost of a step of one over a step of the other.

Blocks of a few steps run in turn, so that other load affects both alike; the results are ratios of
neighbouring blocks. Besides wall time, the CPU time of all threads of the process is measured,
which other processes disturb less.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Sampler, TensorDataset

from pipollux_hybrid import ElasticSampler

__all__ = [
    "OPTIMIZERS",
    "SAMPLES",
    "SIZES",
    "Comparison",
    "Shares",
    "Size",
    "dataset",
    "mlp",
    "steps",
]

FEATURES, CLASSES, SAMPLES = 784, 10, 15360  # whole batches of all sizes, at two replicas
BLOCK_SECONDS = 0.25
FEWEST_BLOCKS = 8
"""The second half of them has quartiles."""
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}


@dataclass(frozen=True)
class Size:
    """A model and a batch per replica, named by the time of a step on one core."""

    width: int
    batch: int


SIZES = {
    "1 ms": Size(width=128, batch=32),
    "10 ms": Size(width=512, batch=128),
    "30 ms": Size(width=1024, batch=128),
    "100 ms": Size(width=1024, batch=384),
}
"""With width 1024 it is the model of 3 million parameters."""


def mlp(size: Size) -> nn.Sequential:
    """Four linear layers, the same in every process."""
    torch.manual_seed(0)
    widths = [FEATURES, size.width, size.width, size.width]
    hidden = [
        layer
        for width, after in itertools.pairwise(widths)
        for layer in (nn.Linear(width, after), nn.ReLU())
    ]
    return nn.Sequential(*hidden, nn.Linear(size.width, CLASSES))


def dataset() -> TensorDataset:
    """Noise with labels."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(SAMPLES, FEATURES, generator=generator),
        torch.randint(CLASSES, (SAMPLES,), generator=generator),
    )


class Shares(Sampler[list[int]]):
    """The batches of an AdaptiveDataLoader for a replica, for torch's own DataLoader."""

    def __init__(self, batch_size: int, num_replicas: int, rank: int) -> None:
        self._sampler = ElasticSampler(SAMPLES, shuffle=True, seed=0)
        self._batch, self._share = batch_size, batch_size // num_replicas
        self._rank = rank
        self._epoch = -1

    def __iter__(self) -> Iterator[list[int]]:
        self._epoch += 1
        order = self._sampler.order(self._epoch)
        starts = range(self._rank * self._share, SAMPLES, self._batch)
        return (order[start : start + self._share].tolist() for start in starts)


def steps(
    batches: Iterator[tuple[Tensor, Tensor]], model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[Tensor]:
    """The loop of a training script; yields the loss of each step."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        yield loss.detach()


@dataclass
class Comparison:
    """Steps of two loops, block by block; `agree` makes a number equal on all replicas, and
    `finish` waits for the device at the end of a block.
    """

    agree: Callable[[int], int] = lambda length: length
    finish: Callable[[], None] = lambda: None
    lengths: list[int] = field(default_factory=list)
    wall: list[tuple[float, float]] = field(default_factory=list)
    """Seconds per step in each block: of the reference, and of HybridParallel."""
    cpu: list[tuple[float, float]] = field(default_factory=list)

    def run(
        self,
        reference: Iterator[Tensor],
        ours: Iterator[Tensor],
        num_steps: int,
        seconds: float = math.inf,
    ) -> None:
        """Run a number of steps of both, or fewer: as many blocks as begin within some seconds."""
        losses = (next(reference), next(ours))  # one-time work: a first batch, lazy imports
        torch.testing.assert_close(*losses)
        end = time.monotonic() + seconds
        length = 1
        while length and (done := sum(self.lengths)) < num_steps:
            length = min(length, num_steps - done)
            loops = [reference, ours] if len(self.wall) % 2 == 0 else [ours, reference]
            timed = (_timed(loop, length, self.finish) for loop in loops)
            walls, cpus, losses = zip(*timed, strict=True)
            torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)  # equal losses
            turn = slice(None) if loops[0] is reference else slice(None, None, -1)
            self.lengths.append(length)
            self.wall.append(walls[turn])
            self.cpu.append(cpus[turn])
            length = max(1, round(BLOCK_SECONDS / max(min(walls), 1e-4)))
            over = time.monotonic() > end and len(self.lengths) >= FEWEST_BLOCKS
            length = self.agree(0 if over else length)

    def rows(self) -> list[list[str]]:
        """Step times by wall clock and by CPU time, and what ours adds."""
        half = len(self.lengths) // 2
        return [
            [kind, *self._steady(times[half:]), self._average(times)]
            for kind, times in (("wall", self.wall), ("CPU", self.cpu))
        ]

    def _steady(self, times: list[tuple[float, float]]) -> list[str]:
        reference, ours = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        added = 1e3 * statistics.median(b - a for a, b in times)
        ratios = [b / a for a, b in times]
        low, middle, high = statistics.quantiles(ratios, n=4)
        return [
            f"{reference:.2f}",
            f"{ours:.2f}",
            f"{added:+.2f}",
            f"{middle:.3f} ({low:.3f} to {high:.3f})",
        ]

    def _average(self, times: list[tuple[float, float]]) -> str:
        """Of all steps from the second on."""
        weighted = list(zip(self.lengths, times, strict=True))
        reference, ours = (
            sum(length * time[side] for length, time in weighted) / sum(self.lengths)
            for side in (0, 1)
        )
        return f"{1e3 * (ours - reference):+.2f} ({ours / reference:.3f})"


HEADER = (
    "| step | optimizer | clock | reference, ms | ours, ms | adds, ms | ratio (quartiles) "
    "| adds on average of all steps, ms (ratio) |\n|---|---|---|---|---|---|---|---|"
)


def run_all(
    names: Iterable[str],
    make: Callable[[Size, str], tuple[Iterator[Tensor], Iterator[Tensor]]],
    num_steps: int,
    say: Callable[[str], None],
    comparison: Callable[[], Comparison] = Comparison,
) -> None:
    """Compare all sizes and optimizers, and print a Markdown table."""
    say(HEADER)
    for name in names:
        for optimizer in OPTIMIZERS:
            compared = comparison()
            compared.run(*make(SIZES[name], optimizer), num_steps)
            for row in compared.rows():
                say(f"| {name} | {optimizer} | {' | '.join(row)} |")


def _timed(
    loop: Iterator[Tensor], length: int, finish: Callable[[], None]
) -> tuple[float, float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(length):
        loss = next(loop)
    finish()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return wall / length, cpu / length, float(loss)
