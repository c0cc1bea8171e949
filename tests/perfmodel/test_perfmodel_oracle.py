"""With one stage and one micro-batch everything is what AdaptDL's published package computes."""

from __future__ import annotations

import adaptdl.goodput as oracle
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipollux_perfmodel import GoodputFunction, GradParams, PerfParams, fit_perf_params
from tests.perfmodel.strategies import allocations, grad_params, perf_params

EXACT = 1e-9


def both(
    params: PerfParams, gradient: GradParams, init_batch_size: int
) -> tuple[GoodputFunction, oracle.GoodputFunction]:
    seven = params[:7]
    return (
        GoodputFunction(seven, gradient, init_batch_size),
        oracle.GoodputFunction(seven, gradient, init_batch_size),
    )


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    perf_params(max_stages=1),
    grad_params(),
    allocations(),
    st.integers(1, 256),
    st.integers(0, 8),
    st.integers(1, 64),
)
def test_goodput_throughput_and_efficiency(
    params: PerfParams,
    gradient: GradParams,
    allocation: tuple[int, int],
    atomic_bsz: int,
    accum_steps: int,
    init_batch_size: int,
) -> None:
    batch_size = allocation[1] * atomic_bsz * (accum_steps + 1)
    assume(init_batch_size <= batch_size)
    ours, theirs = both(params, gradient, init_batch_size)
    configuration = (*allocation, atomic_bsz, accum_steps)
    assert ours(*configuration) == pytest.approx(theirs(*configuration), rel=EXACT)
    assert ours.throughput(*configuration) == pytest.approx(
        theirs.throughput(*configuration), rel=EXACT
    )
    assert ours.efficiency(batch_size) == pytest.approx(theirs.efficiency(batch_size), rel=EXACT)


def test_arrays_give_what_scalars_give() -> None:
    params = PerfParams(0.05, 0.004, 0.2, 0.01, 0.05, 0.003, 1.7)
    ours, theirs = both(params, GradParams(0.3, 4.0), 16)
    nodes, replicas = np.meshgrid(np.arange(1, 5), np.arange(4, 12))
    atomic_bsz, accum_steps = np.full(nodes.shape, 24), nodes % 3
    expected = theirs.evaluate(nodes, replicas, atomic_bsz, accum_steps)
    found = ours.evaluate(nodes, replicas, atomic_bsz, accum_steps)
    np.testing.assert_allclose(found, expected, rtol=EXACT)
    assert found[2, 1] == ours.evaluate(
        int(nodes[2, 1]), int(replicas[2, 1]), 24, int(accum_steps[2, 1])
    )


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    perf_params(max_stages=1),
    grad_params(),
    allocations(),
    st.integers(1, 128),
    st.sampled_from([1, 1.5, 2, 4, 16, 64]),
    st.one_of(st.none(), st.integers(1, 16)),
    st.one_of(st.none(), st.integers(16, 256)),
)
def test_same_batch_size_wherever_theirs_is_allowed(
    params: PerfParams,
    gradient: GradParams,
    allocation: tuple[int, int],
    init_batch_size: int,
    factor: float,
    low: int | None,
    high: int | None,
) -> None:
    max_batch_size = int(init_batch_size * factor)
    ours, theirs = both(params, gradient, init_batch_size)
    goodput, atomic_bsz, accum_steps = ours.optimize(
        *allocation, max_batch_size, (low, high), accumulation=True
    )
    expected = theirs.optimize(*allocation, max_batch_size, (low, high), accumulation=True)
    batch_size = allocation[1] * expected[1] * (expected[2] + 1)
    if expected[0] > 0 and batch_size <= max_batch_size:
        # Theirs, but where its grid misses one that is 0.5 % better.
        same = (atomic_bsz, accum_steps) == expected[1:]
        assert (
            goodput == pytest.approx(expected[0], rel=EXACT)
            if same
            else (goodput > 1.005 * expected[0])
        )
    else:
        # Theirs broke a bound; ours keeps to it, if need be by refusing.
        assert allocation[1] * atomic_bsz * (accum_steps + 1) <= max_batch_size
        assert goodput == 0.0 or (low or 1) <= atomic_bsz <= (high or max_batch_size)


def test_their_batch_size_beyond_the_limit_is_not_ours() -> None:
    # 32 replicas of at least 64 samples are 2048, yet theirs says so under a limit of 1280.
    ours, theirs = both(PerfParams(0.1, 0.01, 0.2, 0.02, 0.1, 0.01, 1.5), GradParams(1, 9), 128)
    _, atomic_bsz, accum_steps = theirs.optimize(8, 32, 1280, (64, 256), accumulation=True)
    assert 32 * atomic_bsz * (accum_steps + 1) > 1280
    assert ours.optimize(8, 32, 1280, (64, 256), accumulation=True).goodput == 0.0


# A realistic profile: a few batch sizes on each of several allocations.
ALLOCATIONS = [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (2, 8), (4, 8)]
BATCHES = [16, 32, 64, 128]
GRID = np.array([(n, r, a) for n, r in ALLOCATIONS for a in BATCHES])
SEVENS = [
    (0.08, 0.003, 0.15, 0.005, 0.05, 0.002, 1.0),
    (0.05, 0.004, 0.12, 0.004, 0.04, 0.002, 1.3),
    (0.12, 0.009, 0.30, 0.020, 0.08, 0.010, 1.5),
    (0.30, 0.020, 0.50, 0.030, 0.20, 0.010, 1.6),
    (0.20, 0.010, 0.40, 0.010, 0.10, 0.005, 2.0),
]


def measure(seven: tuple[float, ...], grid: np.ndarray, noise: float = 0.0) -> list[np.ndarray]:
    """What a job of these parameters measures, noise relative."""
    rng = np.random.default_rng(0)
    nodes, replicas, atomic_bsz = grid.T
    accum, optim = predict(seven, grid)
    jitter = np.exp(noise * rng.normal(size=(2, len(grid))))
    return [nodes, replicas, atomic_bsz, accum * jitter[0], optim * jitter[1]]


def predict(seven: tuple[float, ...], grid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Accumulation and optimizer step times by their model."""
    nodes, replicas, atomic_bsz = grid.T
    params = oracle.PerfParams(*seven)
    accum = oracle._predict_accum_time(params, atomic_bsz)
    network = oracle._predict_network_time(params, nodes, replicas)
    return accum, np.exp(oracle._predict_log_optim_time(params, accum, network))


def their_fit(data: list[np.ndarray]) -> tuple[float, ...]:
    """AdaptDL's fit; the gradient of its loss divides by zero where a fit is perfect."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return tuple(oracle.fit_perf_params(*data))


PROFILES = [
    [(1, 1)],
    [(1, 1), (1, 2), (2, 2)],
    [(1, 1), (2, 2), (2, 4)],
    [(1, 2), (2, 2)],
]


def test_fit_of_exact_data_is_exact_and_agrees_where_theirs_is() -> None:
    agreed = 0
    for profile in PROFILES:
        grid = np.array([(n, r, a) for n, r in profile for a in BATCHES])
        for seven in SEVENS:
            data = measure(seven, grid)
            theirs, ours = their_fit(data), fit_perf_params(*data)
            truth, found = np.stack(predict(seven, grid)), np.stack(predict(ours[:7], grid))
            np.testing.assert_allclose(found, truth, rtol=1e-3)
            assert loss(ours, data) <= loss(theirs, data) + 1e-4
            if np.allclose(predict(theirs, grid), truth, rtol=1e-4):
                agreed += 1
                np.testing.assert_allclose(found, predict(theirs, grid), rtol=1e-3)
                np.testing.assert_allclose(ours[:2], theirs[:2], rtol=0.01)
                np.testing.assert_allclose(ours[:7], theirs, rtol=0.01, atol=2e-3)
    assert agreed >= 10  # L-BFGS-B gives up early on the others


@pytest.mark.parametrize("seven", SEVENS)
def test_fit_of_a_whole_profile(seven: tuple[float, ...]) -> None:
    exact, noisy = measure(seven, GRID), measure(seven, GRID, noise=0.05)
    ours = fit_perf_params(*exact)
    np.testing.assert_allclose(ours[:7], seven, rtol=0.01)
    assert loss(ours, exact) <= loss(their_fit(exact), exact)
    assert loss(fit_perf_params(*noisy), noisy) <= loss(their_fit(noisy), noisy) + 1e-3


def loss(params: tuple[float, ...], data: list[np.ndarray]) -> float:
    return float(oracle._obj_fn(np.array(params[:7]), *data))


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 1, 32)],
        [(1, 1, 32), (1, 1, 32), (1, 1, 32)],
        [(1, 1, 16), (1, 1, 32), (1, 1, 64)],
        [(1, 2, 32)],
        [(1, 1, 16), (1, 2, 16), (1, 2, 32)],
        [(1, 1, 16), (2, 2, 16), (2, 2, 32)],
        [(1, 1, 32), (1, 2, 32), (1, 4, 32)],
    ],
    ids=str,
)
def test_the_same_priors_for_what_was_not_seen(rows: list[tuple[int, int, int]]) -> None:
    data = measure(SEVENS[1], np.array(rows))
    theirs = oracle.PerfParams(*their_fit(data))
    ours = fit_perf_params(*data)
    nodes, replicas, atomic_bsz = data[:3]
    if len(set(atomic_bsz)) == 1:
        assert ours.alpha_c == pytest.approx(theirs.alpha_c, rel=EXACT)
    if not np.any(nodes > 1):
        assert ours.alpha_n == pytest.approx(max(1e-8, 1.1 * ours.alpha_r), rel=1e-6)
    for unseen, names in (
        (not np.any((nodes == 1) & (replicas > 1)), ("alpha_r", "beta_r")),
        (not np.any(replicas > 1), ("alpha_n", "beta_n")),
        (not np.any(replicas > 2), ("beta_n", "beta_r")),
    ):
        for name in names if unseen else ():
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-6), name
