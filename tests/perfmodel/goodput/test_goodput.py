"""Goodput and the choice of the batch size: what always holds, and exhaustive search."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipollux_perfmodel import GoodputFunction, GradParams, PerfParams
from tests.extent import examples
from tests.perfmodel.strategies import allocations, grad_params, perf_params

SEVEN = (0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5)


@examples(100, 400)
@given(
    perf_params(),
    grad_params(),
    allocations(),
    st.integers(1, 128),
    st.integers(0, 6),
    st.integers(1, 64),
    st.sampled_from([1, 2, 4]),
)
def test_goodput_never_exceeds_throughput(
    params: PerfParams,
    gradient: GradParams,
    allocation: tuple[int, int],
    atomic_bsz: int,
    accum_steps: int,
    init_batch_size: int,
    num_microbatches: int,
) -> None:
    batch_size = allocation[1] * atomic_bsz * (accum_steps + 1)
    assume(batch_size >= init_batch_size)
    goodput_fn = GoodputFunction(params, gradient, init_batch_size)
    configuration = (*allocation, atomic_bsz, accum_steps, num_microbatches)
    goodput, throughput = goodput_fn(*configuration), goodput_fn.throughput(*configuration)
    efficiency = goodput_fn.efficiency(batch_size)
    assert 0 < efficiency <= 1 + 1e-12
    assert 0 < goodput <= throughput * (1 + 1e-12)
    assert goodput == pytest.approx(throughput * efficiency)


@examples(50, 200)
@given(grad_params(), st.integers(1, 1000))
def test_efficiency_falls_with_the_batch_size(gradient: GradParams, init_batch_size: int) -> None:
    goodput_fn = GoodputFunction(SEVEN, gradient, init_batch_size)
    batch_sizes = init_batch_size * np.arange(1, 50)
    efficiency = goodput_fn.efficiency(batch_sizes)
    assert efficiency[0] == pytest.approx(1.0)
    assert np.all(np.diff(efficiency) < 0)


def test_efficiency_at_its_limits() -> None:
    all_noise = GoodputFunction(SEVEN, GradParams(0.0, 5.0), 32)
    assert all_noise.efficiency(320) == pytest.approx(1.0)
    no_noise = GoodputFunction(SEVEN, GradParams(5.0, 0.0), 32)
    assert no_noise.efficiency(320) == pytest.approx(0.1)
    nothing_known = GoodputFunction(SEVEN, GradParams(0.0, 0.0), 32)
    assert nothing_known.efficiency(320) == pytest.approx(0.1)


class Limits(NamedTuple):
    """One call of optimize."""

    allocation: tuple[int, int]
    init_batch_size: int
    max_batch_size: int
    low: int | None
    high: int | None
    accumulation: bool
    num_microbatches: int


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    init_batch_size = draw(st.integers(1, 48))
    low = draw(st.one_of(st.none(), st.integers(1, 12)))
    high = draw(st.one_of(st.none(), st.integers(low or 1, 64)))
    return Limits(
        draw(allocations(8)),
        init_batch_size,
        int(init_batch_size * draw(st.sampled_from([1, 1.25, 2, 4, 8]))),
        low,
        high,
        draw(st.booleans()),
        draw(st.sampled_from([1, 1, 2, 3, 4, 8])),
    )


def all_allowed(limits: Limits) -> tuple[np.ndarray, np.ndarray]:
    """Every (atomic_bsz, accum_steps) that the bounds allow."""
    largest = limits.max_batch_size
    atomic_bsz, accum_steps = np.meshgrid(
        np.arange(limits.low or 1, (limits.high or largest) + 1),
        np.arange(largest if limits.accumulation else 1),
        indexing="ij",
    )
    num_replicas = limits.allocation[1]
    batch_size = num_replicas * atomic_bsz * (accum_steps + 1)
    allowed = (limits.init_batch_size <= batch_size) & (batch_size <= largest)
    if limits.num_microbatches == 1 and num_replicas == 1:
        allowed &= (accum_steps > 0) | (batch_size <= limits.init_batch_size)
    if np.any(allowed & (atomic_bsz % limits.num_microbatches == 0)):
        allowed &= atomic_bsz % limits.num_microbatches == 0
    return atomic_bsz[allowed], accum_steps[allowed]


@examples(125, 500)
@given(perf_params(), grad_params(), limits())
def test_optimize_against_exhaustive_search(
    params: PerfParams, gradient: GradParams, limits: Limits
) -> None:
    goodput_fn = GoodputFunction(params, gradient, limits.init_batch_size)
    goodput, atomic_bsz, accum_steps = goodput_fn.optimize(
        *limits.allocation,
        max_batch_size=limits.max_batch_size,
        atomic_bsz_range=(limits.low, limits.high),
        accumulation=limits.accumulation,
        num_microbatches=limits.num_microbatches,
    )
    every_atomic_bsz, every_accum_steps = all_allowed(limits)
    if not every_atomic_bsz.size:
        assert goodput == 0.0
        return
    assert np.any((every_atomic_bsz == atomic_bsz) & (every_accum_steps == accum_steps))
    best = goodput_fn.evaluate(
        *limits.allocation, every_atomic_bsz, every_accum_steps, limits.num_microbatches
    ).max()
    assert goodput >= 0.995 * best
    configuration = (*limits.allocation, atomic_bsz, accum_steps, limits.num_microbatches)
    assert goodput == pytest.approx(goodput_fn.evaluate(*configuration))


def test_arrays_broadcast_and_agree_with_scalars() -> None:
    goodput_fn = GoodputFunction(SEVEN, (1.0, 8.0), 32)
    nodes, replicas = np.array([[1], [2]]), np.array([2, 3, 4, 64])
    found = goodput_fn.optimize(nodes, replicas, 512, (8, 64), True, 4)
    assert all(values.shape == (2, 4) for values in found)
    for row in range(2):
        for column in range(4):
            one = goodput_fn.optimize(row + 1, int(replicas[column]), 512, (8, 64), True, 4)
            assert one == tuple(values[row, column] for values in found)
            assert [type(value) for value in one] == [float, int, int]


def test_one_replica_accumulates_to_see_noise_only_without_micro_batches() -> None:
    goodput_fn = GoodputFunction(SEVEN, (1e-6, 8.0), 32)
    _, atomic_bsz, accum_steps = goodput_fn.optimize(1, 1, 512, None, accumulation=True)
    assert accum_steps >= 1
    assert atomic_bsz * (accum_steps + 1) > 32
    assert goodput_fn.optimize(1, 1, 512, None, accumulation=False)[1:] == (32, 0)
    for accumulation in (True, False):
        _, atomic_bsz, accum_steps = goodput_fn.optimize(1, 1, 512, None, accumulation, 4)
        assert (atomic_bsz, accum_steps) == (512, 0)


def test_without_a_largest_batch_size_the_initial_one_is_kept() -> None:
    goodput_fn = GoodputFunction(SEVEN, (1.0, 8.0), 128)
    goodput, atomic_bsz, accum_steps = goodput_fn.optimize(np.ones(5, int), np.arange(1, 6))
    # Or as near as replicas can share it: 129 and 130 samples for three and five.
    assert atomic_bsz.tolist() == [128, 64, 43, 32, 26]
    assert np.all(goodput > 0)
    assert np.all(accum_steps == 0)


@pytest.mark.parametrize("allocation", [(0, 1), (2, 1), (0, 0), (-1, 2)])
def test_impossible_allocations_are_refused_by_name(allocation: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="num_nodes <= num_replicas"):
        GoodputFunction(SEVEN, (1.0, 8.0), 32).optimize(*allocation)


def test_bad_arguments_are_refused_by_name() -> None:
    goodput_fn = GoodputFunction(SEVEN, (1.0, 8.0), 32)
    with pytest.raises(ValueError, match=r"batch size 16 .* below init_batch_size 32"):
        goodput_fn.evaluate(1, 2, 8, 0)
    with pytest.raises(ValueError, match="num_microbatches"):
        goodput_fn.optimize(1, 1, num_microbatches=0)
    with pytest.raises(ValueError, match="max_batch_size is 0"):
        goodput_fn.optimize(1, 1, max_batch_size=0)
    with pytest.raises(ValueError, match="init_batch_size is 0"):
        GoodputFunction(SEVEN, (1.0, 8.0), 0)
    with pytest.raises(ValueError, match=r"sum to 0\.9"):
        GoodputFunction(PerfParams(*SEVEN, (0.3,), (0.6,)), (1.0, 8.0), 32)
