"""Every sample exactly once an epoch, through any sequence of replicas and batch shapes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_hybrid.elastic.sampler import ElasticSampler
from pipollux_hybrid.job.batch import BatchShape, split_evenly

shapes = st.builds(
    lambda replicas, accum_steps, extra: BatchShape(
        replicas * (accum_steps + 1) + extra, replicas, accum_steps
    ),
    st.integers(1, 5),
    st.integers(0, 3),
    st.integers(0, 20),
)


@given(
    num_samples=st.integers(1, 200),
    runs=st.lists(st.tuples(shapes, st.integers(1, 5)), min_size=1, max_size=8),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_each_sample_once_through_restarts(
    num_samples: int, runs: list[tuple[BatchShape, int]], shuffle: bool, epoch: int
) -> None:
    sampler = ElasticSampler(num_samples, shuffle=shuffle, seed=5)
    taken: list[int] = []
    index = 0
    for shape, iterations in [*runs, (runs[-1][0], num_samples + 1)]:
        replicas = [
            sampler.parts(epoch=epoch, index=index, shape=shape, rank=rank)
            for rank in range(shape.num_replicas)
        ]
        for _ in range(iterations):
            iteration = [_iteration(parts) for parts in replicas]
            if not iteration[0]:
                break
            assert len({len(parts) for parts in iteration}) == 1, "replicas differ in steps"
            assert {p.next_index for parts in iteration for p in parts} == {
                iteration[0][-1].next_index
            }
            for part in itertools.chain(*iteration):
                assert part.indices, "a batch is never empty"
                assert part.num_samples <= shape.atomic_bsz
                taken += part.indices[: part.num_samples]
            index = iteration[0][-1].next_index
    assert sorted(taken) == list(range(num_samples))


def _iteration(parts: object) -> list[object]:
    found = []
    for part in parts:
        found.append(part)
        if part.is_optimizer_step:
            break
    return found


def test_epochs_differ_and_repeat() -> None:
    sampler = ElasticSampler(50, shuffle=True, seed=1)
    assert sampler.order(0).tolist() != sampler.order(1).tolist()
    assert sampler.order(1).tolist() == ElasticSampler(50, shuffle=True, seed=1).order(1).tolist()
    assert sampler.order(1).tolist() != ElasticSampler(50, shuffle=True, seed=2).order(1).tolist()


def test_an_accumulation_step_takes_neighbouring_shares() -> None:
    shape = BatchShape(batch_size=8, num_replicas=2, accum_steps=1)
    sampler = ElasticSampler(13, shuffle=False, seed=0)
    first, second = (
        [p.indices for p in sampler.parts(epoch=0, index=0, shape=shape, rank=rank)]
        for rank in (0, 1)
    )
    assert first == [[0, 1], [4, 5], [8, 9], [11]]
    assert second == [[2, 3], [6, 7], [10], [12]]


@given(st.integers(0, 100), st.integers(1, 12))
def test_split_evenly(count: int, num_parts: int) -> None:
    sizes = split_evenly(count, num_parts)
    assert len(sizes) == num_parts
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="data set is empty"):
        ElasticSampler(0, shuffle=False, seed=0)
