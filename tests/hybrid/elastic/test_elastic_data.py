"""Every sample exactly once an epoch, along the history of a job that survives.

Runs of any number of replicas and batch size follow each other; each ends by an agreed stop, or is
lost and its work since the last checkpoint with it; batch sizes change in between.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

from pipollux_hybrid import AdaptiveBPTTIterator, AdaptiveDataLoader, remaining_epochs_until
from pipollux_hybrid.checkpoint import manager as checkpoint
from pipollux_hybrid.elastic.sampler import ElasticSampler
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from tests.extent import examples
from tests.hybrid.elastic.one_process import Job

EPOCHS = 2


@dataclass(frozen=True)
class Run:
    """One run of a job, by what befalls it."""

    num_replicas: int
    stop_at: int | None
    crash_at: int | None
    save_at: int | None
    propose: dict[int, tuple[int, int, int]]


runs = st.builds(
    lambda num_replicas, end, crashes, save_at, propose: Run(
        num_replicas, None if crashes else end, end if crashes else None, save_at, propose
    ),
    st.integers(1, 4),
    st.integers(0, 12),
    st.booleans(),
    st.none() | st.integers(0, 10),
    st.dictionaries(
        st.integers(0, 8), st.tuples(st.integers(1, 6), st.integers(0, 2), st.integers(1, 4))
    ),
)
histories = st.lists(runs, max_size=5)


@pytest.fixture(autouse=True)
def fresh_context(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Replicas that take turns would look for rank 0's probe when it has been taken away again.
    monkeypatch.setattr(checkpoint, "_check_shared", lambda *_: None)
    contexts.reset()
    yield
    contexts.reset()


class Counting(IterableDataset[int]):
    """A stream of numbers, in another order in each epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch, self.opened = size, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.opened += 1
        yield from order_of(self.epoch, self.size)


def order_of(epoch: int, size: int) -> list[int]:
    return ElasticSampler(size, shuffle=True, seed=9).order(epoch).tolist()


def script_of(
    make: Callable[[], Any], numbers: Callable[[Any, int], list[int]]
) -> Callable[[], Iterator[list[int]]]:
    """A script of two loaders an epoch; yields epoch · 1000 + number for what counts."""

    def script() -> Iterator[list[int]]:
        ctx = context()
        training = make()
        training.autoscale_batch_size(60, (1, 8), gradient_accumulation=True)
        evaluation = AdaptiveDataLoader(TensorDataset(torch.arange(5)), batch_size=3)
        for epoch in remaining_epochs_until(EPOCHS):
            for loader, get in ((training, numbers), (evaluation, lambda batch, n: batch[0][:n])):
                for batch in loader:
                    assert ctx.batch.micro_step is not None
                    found = get(batch, ctx.batch.micro_step.num_samples)
                    offset = 1000 * epoch + (500 if loader is evaluation else 0)
                    yield [offset + int(number) for number in found]

    return script


def run_history(
    directory: str, script: Callable[[], Iterator[list[int]]], history: list[Run]
) -> Job:
    job = Job(Path(directory), script)
    for run in history:
        if not job.is_done:
            job.run(
                run.num_replicas,
                stop_at=run.stop_at,
                crash_at=run.crash_at,
                save_at=run.save_at,
                propose=run.propose,
            )
    job.finish(2)
    return job


def with_evaluation(training: list[list[int]]) -> list[int]:
    """What a job has in all, given what it trains on in each epoch."""
    return [
        1000 * epoch + number
        for epoch in range(EPOCHS)
        for number in [*training[epoch], *range(500, 505)]
    ]


quick = examples(60)


@quick
@given(history=histories, size=st.integers(1, 70), batch_size=st.integers(1, 12))
def test_map_style(history: list[Run], size: int, batch_size: int) -> None:
    """In one order, which depends on seed and epoch alone."""
    data = TensorDataset(torch.arange(size))
    script = script_of(
        lambda: AdaptiveDataLoader(data, batch_size=batch_size, shuffle=True, seed=9),
        lambda batch, count: batch[0][:count].tolist(),
    )
    with tempfile.TemporaryDirectory() as directory:
        job = run_history(directory, script, history)
    assert job.taken() == with_evaluation([order_of(epoch, size) for epoch in range(EPOCHS)])


@quick
@given(history=histories, size=st.integers(1, 70), batch_size=st.integers(1, 12))
def test_iterable(history: list[Run], size: int, batch_size: int) -> None:
    script = script_of(
        lambda: AdaptiveDataLoader(Counting(size), batch_size=batch_size),
        lambda batch, count: batch[:count].tolist(),
    )
    with tempfile.TemporaryDirectory() as directory:
        job = run_history(directory, script, history)
    assert job.taken() == with_evaluation([order_of(epoch, size) for epoch in range(EPOCHS)])


@quick
@given(
    history=histories,
    size=st.integers(2, 150),
    batch_size=st.integers(1, 12),
    bptt_len=st.integers(1, 5),
)
def test_bptt(history: list[Run], size: int, batch_size: int, bptt_len: int) -> None:
    """Every token but the first is a target once an epoch, with the one before it for input."""

    def targets(batch: tuple[torch.Tensor, torch.Tensor], count: int) -> list[int]:
        inputs, wanted = batch
        assert inputs.shape == wanted.shape
        assert inputs.shape[1] <= bptt_len
        assert torch.equal(inputs + 1, wanted)
        return wanted[:count].flatten().tolist()

    script = script_of(
        lambda: AdaptiveBPTTIterator(torch.arange(size), batch_size, bptt_len), targets
    )
    with tempfile.TemporaryDirectory() as directory:
        job = run_history(directory, script, history)
    wanted = with_evaluation([list(range(1, size))] * EPOCHS)
    assert Counter(job.taken()) == Counter(wanted)
