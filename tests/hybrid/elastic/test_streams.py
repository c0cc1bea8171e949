"""Iterable data sets: what is asked of them, and what happens when they do not keep to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import IterableDataset

from pipollux_hybrid import (
    AdaptiveDataLoader,
    CheckpointError,
    ConfigurationError,
    SynchronizationError,
    init_process_group,
    remaining_epochs_until,
    save_all_states,
)
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.hybrid.replicas import run_replicas


@pytest.fixture(autouse=True)
def fresh_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_DIR", str(tmp_path))
    contexts.reset()
    yield
    contexts.reset()


class Numbers(IterableDataset[int]):
    """Counts to a size, and counts how often it was opened and read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.opened = self.read = 0

    def __iter__(self) -> Iterator[int]:
        self.opened += 1
        for number in range(self.size):
            self.read += 1
            yield number


class Skipping(Numbers):
    """One that can begin anywhere."""

    def skip(self, num_samples: int) -> Iterator[int]:
        return iter(range(num_samples, self.size))


def stop_in_the_middle(size: int = 20) -> None:
    loader = AdaptiveDataLoader(Numbers(size), batch_size=4)
    for _ in remaining_epochs_until(1):
        for number, _ in enumerate(loader):
            if number == 3:
                save_all_states()
                break
        break
    contexts.reset()


@pytest.mark.parametrize(("kind", "read"), [(Numbers, 20), (Skipping, 0)])
def test_resumes_by_reading_or_by_skipping(kind: type[Numbers], read: int) -> None:
    stop_in_the_middle()
    data = kind(20)
    assert [batch.tolist() for batch in AdaptiveDataLoader(data, batch_size=4)] == [
        [12, 13, 14, 15],
        [16, 17, 18, 19],
    ]
    assert data.read == read


def test_a_new_batch_size_goes_on_with_the_open_stream() -> None:
    data = Numbers(40)
    loader = AdaptiveDataLoader(data, batch_size=4)
    loader.autoscale_batch_size(20, (1, 20))
    sizes = []
    for batch in loader:
        sizes.append(len(batch))
        context().component(Metrics)._proposal = (4 + len(sizes), 0, 0)
    assert sum(sizes) == 40
    assert len(set(sizes[:-1])) > 2
    assert (data.opened, data.read) == (1, 40)


def test_a_stream_that_is_shorter_than_the_checkpoint() -> None:
    stop_in_the_middle()
    with pytest.raises(CheckpointError, match=r"ends within 12 samples.*same samples in every"):
        list(AdaptiveDataLoader(Numbers(10), batch_size=4))


def test_an_empty_stream() -> None:
    with pytest.raises(ConfigurationError, match=r"data set is empty"):
        list(AdaptiveDataLoader(Numbers(0)))


def test_other_data_than_before() -> None:
    stop_in_the_middle()
    with pytest.raises(CheckpointError, match=r"stopped at sample 12 .* same data"):
        AdaptiveDataLoader(list(range(20)), batch_size=4)  # type: ignore[arg-type]  # a list will do


def shares(num_workers: int) -> list[list[int]]:
    init_process_group("gloo")
    loader = AdaptiveDataLoader(Numbers(23), batch_size=6, num_workers=num_workers)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in loader]
    return [batch.tolist() for batch in loader]


def test_a_worker_gives_the_same_batches() -> None:
    alone, helped = (run_replicas(shares, 2, workers) for workers in (0, 1))
    assert alone == helped
    assert alone == [
        [[0, 1, 2], [6, 7, 8], [12, 13, 14], [18, 19, 20]],
        [[3, 4, 5], [9, 10, 11], [15, 16, 17], [21, 22]],
    ]


def unequal(sizes: tuple[int, int]) -> str:
    """A data set that was sharded by hand, or otherwise differs."""
    init_process_group("gloo")
    loader = AdaptiveDataLoader(Numbers(sizes[context().env.rank]), batch_size=4)
    passes = 0
    try:
        for _ in range(2):
            for _ in loader:
                passes += 1
    except SynchronizationError as error:
        return f"{passes} {error}"
    return "nobody noticed"


@pytest.mark.parametrize(("sizes", "passes"), [((10, 20), 3), ((11, 10), 3), ((8, 9), 2)])
def test_streams_of_unequal_length_are_found_out_by_all(
    sizes: tuple[int, int], passes: int
) -> None:
    for told in run_replicas(unequal, 2, sizes):
        assert told.startswith(f"{passes} replica "), "in the iteration where the first one ends"
        assert "another replica is not: every replica must be given the same data sets" in told
