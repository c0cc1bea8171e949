"""Step times of replicas that push to servers and pull from them every H steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_perfmodel import (
    GoodputFunction,
    GradParams,
    PerfParams,
    fit_perf_params,
    perf_params_from_json,
    perf_params_to_json,
)
from pipollux_perfmodel.timing.params import AUTO, SYNC_SHARE
from pipollux_perfmodel.timing.step_time import step_time, sync_interval
from tests.extent import examples
from tests.perfmodel.strategies import allocations, pipelines

SLOW = PerfParams(0.1, 0.0, 3.9999, 1.0, 0.05, 0.01, 1.0)
"""A step of 0.1 s, about 4 s of network for two replicas, and 1 s more for each further one."""


@examples(50, 200)
@given(pipelines(), allocations(), st.integers(0, 3), st.integers(1, 200), st.data())
def test_a_round_of_h_steps_takes_h_steps_and_what_is_not_hidden(
    params: PerfParams,
    allocation: tuple[int, int],
    accum_steps: int,
    sync_every: int,
    data: st.DataObject,
) -> None:
    overlap = data.draw(st.integers(0, sync_every - 1))
    params = params._replace(sync_every=sync_every, sync_overlap=overlap, tied_exchange=0.0)
    time = step_time(params, *map(np.array, (*allocation, 16, accum_steps, 4)))
    # A push at time 0, which step τ waits for.
    network, clock = float(time.network_time), 0.0
    for step in range(sync_every + 1):
        clock += (accum_steps + 1) * float(time.accum_time) if step else 0.0
        if step == overlap:
            clock = max(clock, network)
    assert sync_every * float(time.total) == pytest.approx(clock, rel=1e-9)


@pytest.mark.parametrize(
    ("replicas", "interval", "total"),
    [(2, 800, 0.1 + 3.9999 / 800), (3, 1000, 0.1 + 4.9999 / 1000), (1, 1, 0.1)],
)
def test_auto_is_the_smallest_interval_below_the_share(
    replicas: int, interval: int, total: float
) -> None:
    params = SLOW._replace(sync_every=AUTO)
    nodes = min(replicas, 2)
    time = step_time(params, *map(np.array, (nodes, replicas, 8, 0, 1)))
    assert int(sync_interval(params, time.network_time, time.accum_time)) == interval
    assert float(time.total) == pytest.approx(total)
    if interval > 1:
        more = float(time.network_time) / (interval - 1)
        assert more > SYNC_SHARE * float(time.accum_time)


def test_auto_is_one_on_fast_links() -> None:
    params = SLOW._replace(alpha_n=0.005, beta_n=0.0, sync_every=AUTO)
    assert GoodputFunction(params, GradParams(1.0, 1.0), 8).step_time(2, 2, 8, 0).total == (
        pytest.approx(0.105)
    )


def test_more_replicas_pay_on_slow_links_only_by_push_and_pull() -> None:
    """Of fixed batches per replica; one all-reduce per step makes two replicas slower than one."""
    gradient = GradParams(1.0, 100.0)

    def speedup(params: PerfParams) -> float:
        goodput_fn = GoodputFunction(params, gradient, 8)
        return float(goodput_fn(4, 4, 8, 0) / goodput_fn(1, 1, 8, 0))

    assert speedup(SLOW) < 0.1
    assert speedup(SLOW._replace(sync_every=100)) > 2.0


def test_a_fit_separates_compute_from_pushes() -> None:
    true = PerfParams(0.02, 0.001, 3.0, 0.5, 1.0, 0.2, 1.0, sync_every=50, sync_overlap=4)
    rows = [(1, 1, 8), (1, 1, 16), (1, 2, 8), (1, 4, 8), (2, 2, 8), (2, 4, 16), (4, 8, 8)]
    nodes, replicas, sizes = map(np.array, zip(*rows, strict=True))
    whole = true._replace(sync_every=1, sync_overlap=0)
    time = step_time(whole, nodes, replicas, sizes, np.zeros(len(rows)), np.ones(len(rows)))
    fitted = fit_perf_params(
        nodes, replicas, sizes, time.accum_time, time.optim_time, sync_every=50, sync_overlap=4
    )
    assert (fitted.sync_every, fitted.sync_overlap, fitted.gamma) == (50, 4, 1.0)
    for n, r in ((1, 2), (2, 2), (2, 4), (4, 8)):
        at = tuple(map(np.array, (n, r, 8, 0, 1)))
        assert step_time(fitted, *at).total == pytest.approx(step_time(true, *at).total, rel=0.02)


def test_json_and_ranges() -> None:
    params = SLOW._replace(sync_every=AUTO, sync_overlap=2)
    written = perf_params_to_json(params)
    assert (written["sync_every"], written["sync_overlap"]) == (AUTO, 2)
    assert perf_params_from_json(written) == params
    assert "sync_every" not in perf_params_to_json(SLOW)
    with pytest.raises(ValueError, match="sync_every is -2"):
        perf_params_from_json({**written, "sync_every": -2})
