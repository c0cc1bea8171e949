"""With one stage and one micro-batch everything is what AdaptDL's published package computes."""

from __future__ import annotations

import adaptdl.goodput as oracle
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipollux_perfmodel import GoodputFunction, GradParams, PerfParams, fit_perf_params
from tests.extent import examples, first, first_points
from tests.perfmodel.measured import Job, errors, measure, random_jobs, their_fit
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


@examples(150, 600)
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


@pytest.mark.parametrize("count", first(1, [200, 1000]))
def test_many_jobs_at_once(count: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(count):
        seven = np.append(np.exp(rng.uniform(np.log(1e-6), np.log(10.0), 6)), rng.uniform(1, 10))
        gradient = GradParams(*np.exp(rng.uniform(np.log(1e-4), np.log(1e4), 2)))
        init_batch_size = int(rng.integers(1, 512))
        ours, theirs = both(PerfParams(*seven.tolist()), gradient, init_batch_size)
        replicas = rng.integers(1, 65, 50)
        nodes = rng.integers(1, replicas + 1)
        accum_steps = rng.integers(0, 9, 50)
        least = -(-init_batch_size // (replicas * (accum_steps + 1)))
        atomic_bsz = least + rng.integers(0, 512, 50)
        sizes = nodes, replicas, atomic_bsz, accum_steps
        batch_size = replicas * atomic_bsz * (accum_steps + 1)
        close = {"rtol": EXACT, "atol": 1e-15}  # zero seconds are 1e-8 and a little
        np.testing.assert_allclose(ours.evaluate(*sizes), theirs.evaluate(*sizes), **close)
        np.testing.assert_allclose(ours.throughput(*sizes), theirs.throughput(*sizes), **close)
        np.testing.assert_allclose(
            ours.efficiency(batch_size), theirs.efficiency(batch_size), **close
        )
        times = ours.step_time(*sizes)
        accum = oracle._predict_accum_time(oracle.PerfParams(*seven), atomic_bsz)
        network = oracle._predict_network_time(oracle.PerfParams(*seven), nodes, replicas)
        optim = np.exp(oracle._predict_log_optim_time(oracle.PerfParams(*seven), accum, network))
        np.testing.assert_allclose(times.accum_time, accum, **close)
        np.testing.assert_allclose(times.network_time, network, **close)
        np.testing.assert_allclose(times.optim_time, optim, **close)
        np.testing.assert_allclose(times.total, accum_steps * accum + optim, **close)


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


@examples(150, 600)
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
        # Theirs, but where its grid misses one that is 0.3 % better.
        same = (atomic_bsz, accum_steps) == expected[1:]
        assert (
            goodput == pytest.approx(expected[0], rel=EXACT)
            if same
            else (goodput > 1.003 * expected[0])
        )
    else:
        # Theirs broke a bound; ours keeps to it, if need be by refusing.
        in_bounds = allocation[1] * atomic_bsz * (accum_steps + 1) <= max_batch_size
        in_range = (low or 1) <= atomic_bsz <= (high or max_batch_size)
        assert goodput == 0.0 or (in_bounds and in_range)


@examples(50, 200)
@given(perf_params(max_stages=1), grad_params(), allocations(), st.integers(1, 128))
def test_same_batch_size_without_a_largest(
    params: PerfParams, gradient: GradParams, allocation: tuple[int, int], init_batch_size: int
) -> None:
    # Both round the initial batch size up to what the replicas can share.
    ours, theirs = both(params, gradient, init_batch_size)
    found = ours.optimize(*allocation, accumulation=True)
    expected = theirs.optimize(*allocation, accumulation=True)
    assert found[1:] == expected[1:] or found.goodput > 1.003 * expected[0]
    assert found[1:] != expected[1:] or found.goodput == pytest.approx(expected[0], rel=EXACT)
    assert allocation[1] * (found.atomic_bsz - 1) * (found.accum_steps + 1) < init_batch_size


def test_their_batch_size_beyond_the_limit_is_not_ours() -> None:
    # 32 replicas of at least 64 samples are 2048, yet theirs says so under a limit of 1280.
    ours, theirs = both(PerfParams(0.1, 0.01, 0.2, 0.02, 0.1, 0.01, 1.5), GradParams(1, 9), 128)
    _, atomic_bsz, accum_steps = theirs.optimize(8, 32, 1280, (64, 256), accumulation=True)
    assert 32 * atomic_bsz * (accum_steps + 1) > 1280
    assert ours.optimize(8, 32, 1280, (64, 256), accumulation=True).goodput == 0.0


# A realistic profile: a few batch sizes on each of several allocations.
PLACES = ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (2, 8), (4, 8))
BATCHES = (16, 32, 64, 128)
SEVENS = [
    PerfParams(0.08, 0.003, 0.15, 0.005, 0.05, 0.002, 1.0),
    PerfParams(0.05, 0.004, 0.12, 0.004, 0.04, 0.002, 1.3),
    PerfParams(0.12, 0.009, 0.30, 0.020, 0.08, 0.010, 1.5),
    PerfParams(0.30, 0.020, 0.50, 0.030, 0.20, 0.010, 1.6),
    PerfParams(0.20, 0.010, 0.40, 0.010, 0.10, 0.005, 2.0),
]
NOISE = 0.05


@pytest.mark.parametrize("seven", first(1, SEVENS))
def test_fit_of_a_whole_profile(seven: PerfParams) -> None:
    exact = measure(seven, PLACES, BATCHES)
    ours = fit_perf_params(*exact[:5])
    np.testing.assert_allclose(ours[:7], seven[:7], rtol=1e-3)
    assert errors(ours, exact).max() < 1e-6
    assert errors(ours, exact).max() <= errors(their_fit(Job(seven, PLACES, BATCHES)), exact).max()


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", first(1, [20, 40]))
def test_fits_of_exact_data_are_better_than_theirs(count: int) -> None:
    worst = []
    for job in random_jobs(count):
        exact = measure(job.truth, *job[1:])
        ours = errors(fit_perf_params(*exact[:5]), exact).max()
        theirs = errors(their_fit(job), exact).max()
        worst.append((ours, theirs))
        # One batch size does not tell what of it is fixed, and above two γ hides most of the
        # network, so that there its pull towards one moves the others.
        if len(job.sizes) > 1 and job.truth.gamma <= 2:
            assert ours <= theirs + 1e-6, job
        assert ours < 5e-3, job
    ours, theirs = np.array(worst).T
    assert np.median(ours) < 1e-7
    assert np.mean(ours < 1e-6) > 0.75
    # Theirs end early on many.
    assert np.median(theirs) > 1e-3
    assert theirs.max() > 0.1


@pytest.mark.parametrize(
    ("seven", "places", "sizes"),
    first_points(
        1,
        [
            (
                (0.1209, 0.0029, 0.185, 0.0075, 0.064, 0.0067, 2.9241),
                ((1, 2), (1, 4), (4, 8)),
                (8, 64),
            ),
            (
                (0.1681, 0.0076, 0.0814, 0.0137, 0.074, 0.0062, 2.0847),
                ((1, 1), (1, 2), (1, 4), (2, 2), (2, 8), (4, 8), (4, 16)),
                (8, 64),
            ),
        ],
    ),
)
def test_a_coarse_search_that_ends_near_is_taken_further(
    seven: tuple[float, ...], places: tuple[tuple[int, int], ...], sizes: tuple[int, ...]
) -> None:
    # The first searches end 0.6 % and 0.3 % off, with beta_r at nothing.
    exact = measure(PerfParams(*seven), places, sizes)
    assert errors(fit_perf_params(*exact[:5]), exact).max() < 1e-6


@pytest.mark.parametrize("index", [1, 26])
def test_more_numbers_are_not_taken_where_their_search_gets_stuck(index: int) -> None:
    # By 21 % and 15 % on these, where AdaptDL's numbers are 5 % off at most.
    job = random_jobs(27)[index]
    noisy = measure(job.truth, *job[1:], noise=0.02, seed=3)
    assert errors(fit_perf_params(*noisy[:5]), measure(job.truth, *job[1:])).max() < 0.08


@pytest.mark.exhaustive
def test_fits_of_noisy_data_predict_as_well_as_theirs() -> None:
    # Data of their own formulas. Ours has more numbers for noise to move.
    ours, theirs = np.array(
        [
            [
                errors(fit(job), measure(job.truth, *job[1:])).mean()
                for fit in (our_noisy_fit, their_noisy_fit)
            ]
            for job in random_jobs(15)
        ]
    ).T
    assert ours.mean() < 1.3 * theirs.mean()
    assert ours.mean() < 0.6 * NOISE


@pytest.mark.exhaustive
def test_fits_of_data_beyond_their_formulas_are_better() -> None:
    # The network grows by the logarithm, and replicas on a node slow each other down.
    beyond = {"growth_n": 0.2, "contention": 0.05, "two_node_penalty": 0.3}
    for seven in SEVENS:
        job = Job(seven._replace(**beyond), PLACES, BATCHES)
        clean = measure(job.truth, *job[1:])
        ours, theirs = (errors(fit(job), clean).mean() for fit in (our_noisy_fit, their_noisy_fit))
        assert ours < 0.75 * theirs
        assert ours < 0.6 * NOISE


def our_noisy_fit(job: Job) -> PerfParams:
    return fit_perf_params(*measure(job.truth, *job[1:], noise=NOISE)[:5])


def their_noisy_fit(job: Job) -> tuple[float, ...]:
    return their_fit(job, NOISE)


@pytest.mark.parametrize(
    "rows",
    first(
        4,
        [
            [(1, 1, 32)],
            [(1, 1, 16), (1, 1, 32), (1, 1, 64)],
            [(1, 2, 32)],
            [(1, 1, 16), (1, 2, 16), (1, 2, 32)],
            [(1, 1, 32), (1, 1, 32), (1, 1, 32)],
            [(1, 1, 16), (2, 2, 16), (2, 2, 32)],
            [(1, 1, 32), (1, 2, 32), (1, 4, 32)],
        ],
    ),
    ids=str,
)
def test_the_same_priors_for_what_was_not_seen(rows: list[tuple[int, int, int]]) -> None:
    nodes, replicas, atomic_bsz = np.array(rows).T
    times = GoodputFunction(SEVENS[1], (1.0, 1.0), 1).step_time(nodes, replicas, atomic_bsz, 0)
    data = nodes, replicas, atomic_bsz, times.accum_time, times.optim_time
    with np.errstate(divide="ignore", invalid="ignore"):
        theirs = oracle.fit_perf_params(*data)
    ours = fit_perf_params(*data)
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
