"""The formulas of step time, against simulation and against what must always hold."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_perfmodel import GoodputFunction, PerfParams, gpipe_schedule
from pipollux_perfmodel.timing.step_time import pipeline_time, step_time
from tests.extent import examples
from tests.perfmodel.differentiated import gradient_of
from tests.perfmodel.strategies import allocations, perf_params, pipelines


@examples(100, 400)
@given(perf_params(), st.integers(1, 16), st.integers(1, 64))
def test_ideal_pipeline_takes_as_long_as_its_schedule(
    params: PerfParams, num_microbatches: int, micro_bsz: int
) -> None:
    params = params._replace(overlap=1.0)
    compute = params.alpha_c + params.beta_c * micro_bsz
    events = gpipe_schedule(
        [share * compute for share in params.forward_shares],
        [share * compute for share in params.backward_shares],
        num_microbatches,
    )
    makespan = max(event.end for event in events)
    assert pipeline_time(params, micro_bsz, num_microbatches) == pytest.approx(makespan, rel=1e-12)


@examples(100, 400)
@given(perf_params(), st.integers(1, 16), st.floats(0, 1), st.floats(0, 1))
def test_more_overlap_is_never_slower(
    params: PerfParams, num_microbatches: int, one: float, other: float
) -> None:
    less, more = sorted((one, other))
    slow = pipeline_time(params._replace(overlap=less), 8, num_microbatches)
    fast = pipeline_time(params._replace(overlap=more), 8, num_microbatches)
    assert fast <= slow * (1 + 1e-12)
    one_by_one = num_microbatches * (params.alpha_c + params.beta_c * 8)
    assert pipeline_time(params._replace(overlap=0.0), 8, num_microbatches) == pytest.approx(
        one_by_one
    )


@examples(50, 200)
@given(perf_params(max_stages=1), st.integers(1, 16))
def test_one_stage_has_nothing_to_overlap(params: PerfParams, num_microbatches: int) -> None:
    # Shares of one stage sum to 1, so every micro-batch costs C(b), whatever overlap is.
    compute = params.alpha_c + params.beta_c * 8
    assert pipeline_time(params, 8, num_microbatches) == pytest.approx(num_microbatches * compute)


@examples(150, 600)
@given(
    perf_params(), allocations(), st.integers(1, 512), st.integers(0, 8), st.sampled_from([1, 2, 8])
)
def test_optimizer_step_is_bounded_by_its_parts(
    params: PerfParams,
    allocation: tuple[int, int],
    atomic_bsz: int,
    accum_steps: int,
    num_microbatches: int,
) -> None:
    goodput_fn = GoodputFunction(params, (1.0, 1.0), 1)
    time = goodput_fn.step_time(*allocation, atomic_bsz, accum_steps, num_microbatches)
    slack = 1 + 1e-12
    assert time.optim_time * slack >= max(time.accum_time, time.network_time)
    assert time.optim_time <= (time.accum_time + time.network_time) * slack
    assert time.total == pytest.approx(accum_steps * time.accum_time + time.optim_time)
    assert all(isinstance(value, float) for value in time)


@examples(50, 200)
@given(pipelines(), allocations(), st.floats(1e-6, 1.0), st.integers(0, 3))
def test_an_exchange_of_tied_gradients_is_once_an_optimizer_step(
    params: PerfParams, allocation: tuple[int, int], seconds: float, accum_steps: int
) -> None:
    """Nothing hides it, also on one replica; and none is none to the last digit."""
    sizes = tuple(map(np.array, (*allocation, 16, accum_steps, 4)))
    before, after = (step_time(params._replace(tied_exchange=x), *sizes) for x in (0.0, seconds))
    assert after.accum_time == before.accum_time
    assert after.optim_time == before.optim_time + seconds
    assert after.total == pytest.approx(before.total + seconds, rel=1e-12)


def test_network_depends_on_the_slowest_link() -> None:
    params = PerfParams(0.1, 0.01, 0.4, 0.03, 0.1, 0.02, 1.0)
    goodput_fn = GoodputFunction(params, (1.0, 1.0), 1)
    network = goodput_fn.step_time([1, 1, 1, 2, 3], [1, 2, 4, 2, 5], 8, 0).network_time
    np.testing.assert_allclose(network, [0.0, 0.1, 0.14, 0.4, 0.49], atol=2e-8)


def test_extreme_times_neither_overflow_nor_vanish() -> None:
    for scale in (1e-40, 1e40):
        params = PerfParams(scale, 0.0, scale, 0.0, scale, 0.0, 10.0)
        time = GoodputFunction(params, (1.0, 1.0), 1).step_time(2, 2, 8, 0)
        assert time.optim_time == pytest.approx(scale * 2**0.1)


def test_gradients_are_exact() -> None:
    def total(alpha_c: float, gamma: float, overlap: float) -> float:
        params = PerfParams(alpha_c, 0.01, 0.2, 0.02, 0.1, 0.01, gamma, (0.2, 0.1), (0.3, 0.4))
        params = params._replace(overlap=overlap)
        one, two = np.array([1, 2]), np.array([2, 4])
        return float_sum(step_time(params, one, two, np.array([8, 16]), 1, 4).total)

    def float_sum(values: np.ndarray) -> float:
        return anp.sum(values)

    point, step = (0.1, 1.7, 0.6), 1e-6
    for argument in range(3):
        exact = gradient_of(total, *point, argument=argument)
        shifted = [list(point), list(point)]
        shifted[0][argument] -= step
        shifted[1][argument] += step
        numeric = (total(*shifted[1]) - total(*shifted[0])) / (2 * step)
        assert exact == pytest.approx(numeric, rel=1e-6)
