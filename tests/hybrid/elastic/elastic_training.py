"""A training script over any kind of elastic data, for tests of whole runs.

``$DATA`` says which kind. What a replica trains on goes to ``$RESULTS/samples-G-RANK.txt`` as
(step, epoch, numbers), and what an accumulator found at the end to ``$RESULTS/found-RANK.txt``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import pipollux
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.hybrid.elastic.training import RESULTS, hold

SIZE = 121
EPOCHS = 3


class Stream(IterableDataset[tuple[Tensor]]):
    """The numbers from 0 on, in an order of the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        generator = torch.Generator().manual_seed(self.epoch)
        return ((number,) for number in torch.randperm(SIZE, generator=generator))


def make_loader(kind: str) -> pipollux.AdaptiveDataLoader | pipollux.AdaptiveBPTTIterator:
    """A loader of batches whose last element are the numbers 0 to SIZE - 1."""
    numbers = TensorDataset(torch.arange(SIZE))
    match kind:
        case "workers":
            return pipollux.AdaptiveDataLoader(numbers, 7, shuffle=True, num_workers=2)
        case "stream":
            return pipollux.AdaptiveDataLoader(Stream(), 7)
        case "stream-worker":
            return pipollux.AdaptiveDataLoader(Stream(), 7, num_workers=1)
        case "text":
            # A target is one more than its input: the first of all is number 0.
            return pipollux.AdaptiveBPTTIterator(torch.arange(-1, SIZE), 7, bptt_len=2)
    raise ValueError(kind)


def main() -> None:
    pipollux.init_process_group("gloo")
    torch.manual_seed(1)
    module = nn.Sequential(nn.Embedding(SIZE, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = make_loader(os.environ["DATA"])
    model = pipollux.HybridParallel(module, optimizer, num_stages=2)
    accum = pipollux.Accumulator()
    rank = pipollux.replica_rank()
    log = (RESULTS / f"samples-{context().env.attempt}-{rank}.txt").open("a")
    for epoch in pipollux.remaining_epochs_until(EPOCHS):
        for batch in loader:
            hold(context().component(Metrics).step)
            numbers = batch[-1]
            optimizer.zero_grad()
            output = model(numbers)
            F.cross_entropy(output.flatten(0, -2), numbers.flatten() % 3).backward()
            optimizer.step()
            micro_step = context().batch.micro_step
            assert micro_step is not None
            counted = numbers[: micro_step.num_samples].flatten()
            accum["sum"] += counted.sum()
            accum["count"] += len(counted)
            print(context().component(Metrics).step, epoch, *counted.tolist(), file=log, flush=True)
    with accum.synchronized():
        (RESULTS / f"found-{rank}.txt").write_text(f"{int(accum['sum'])} {accum['count']}")


if __name__ == "__main__":
    main()
