"""The loss, written by the formulas, and its gradient, written out: autograd is the judge."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest

from pipollux_perfmodel import PerfParams
from pipollux_perfmodel.fitting.loss import (
    IS_TIME,
    NAMES,
    NEUTRAL,
    loss_and_gradient,
    make_rows,
    rmse,
    with_values,
)
from pipollux_perfmodel.fitting.measurements import Profile
from pipollux_perfmodel.timing.params import SCHEDULES, Checkpoint
from pipollux_perfmodel.timing.step_time import (
    compute_time,
    network_time,
    optim_time,
    pipeline_factor,
    slowdown,
)
from tests.extent import turns
from tests.perfmodel.differentiated import Numbers, gradient_of

BLANK = PerfParams(*[1e-8] * 6, 1.0)


def random_profile(rng: np.random.Generator, compute: str) -> Profile:
    """Times of any size, some a hundredfold off, as one weight each or several."""
    points = int(rng.integers(1, 25))
    nodes = rng.integers(1, 6, points)
    times = np.exp(rng.normal(-2, 2, size=(3, points)))
    measured = {"all": 1.0, "some": 0.5, "none": 0.0}[compute]
    times[2, rng.uniform(size=points) >= measured] = np.nan
    return Profile(
        nodes.astype(float),
        nodes * rng.integers(1, 5, points).astype(float),
        rng.choice([1.0, 2.0, 8.0], points),
        rng.uniform(0.5, 100, points),
        *times,
        rng.integers(1, 6, points).astype(float),
    )


def random_values(rng: np.random.Generator) -> np.ndarray:
    values = np.empty(len(NAMES))
    values[:6] = np.exp(rng.normal(-4, 2, 6))
    values[NAMES.index("overhead")] = rng.choice([0.0, np.exp(rng.normal(-4, 2))])
    values[6:12] = (
        rng.choice([1.0, 10.0, rng.uniform(1, 10)]),  # gamma
        rng.choice([0.0, 1.0, rng.uniform(0, 1)]),  # overlap
        rng.choice([1.0, 10.0, rng.uniform(1, 10)]),  # gamma_c
        rng.choice([0.0, rng.uniform(0, 3)]),  # contention
        rng.choice([1.0, rng.uniform(-2, 2)]),  # growth_n
        rng.choice([0.0, rng.uniform(0, 3)]),  # two_node_penalty
    )
    return values


def random_shape(rng: np.random.Generator, checkpoint: Checkpoint) -> PerfParams:
    stages = int(rng.integers(1, 5))
    shares = tuple(rng.dirichlet(np.ones(2 * stages)).tolist())
    return BLANK._replace(
        forward_shares=shares[:stages],
        backward_shares=shares[stages:],
        checkpoint=checkpoint,
        schedule=SCHEDULES[rng.integers(2)],
    )


def loss(params: PerfParams, profile: Profile, rounding: float = 0.0) -> Numbers:
    """Return the loss of parameters by the formulas of `step_time`."""
    slow = slowdown(params, profile.num_nodes, profile.num_replicas)
    compute = compute_time(params, profile.micro_bsz) * slow
    accum = compute * pipeline_factor(params, profile.num_microbatches) + params.overhead
    network = network_time(params, profile.num_nodes, profile.num_replicas)
    optim = optim_time(params.gamma, accum, network)
    error = robust_rmse(anp.log(accum) - np.log(profile.accum_time), profile.weight, rounding)
    error += robust_rmse(anp.log(optim) - np.log(profile.optim_time), profile.weight, rounding)
    there = np.flatnonzero(~np.isnan(profile.compute_time))
    if there.size:
        errors = anp.log(compute)[there] - np.log(profile.compute_time[there])
        error += 0.1 * robust_rmse(errors, profile.weight[there], rounding)
    growth = (params.beta_n / params.alpha_n) ** 2 + (params.beta_r / params.alpha_r) ** 2
    pulls = 1e-3 * ((params.gamma - 1) ** 2 + (params.overlap - 1) ** 2 + (params.gamma_c - 1) ** 2)
    pulls += 1e-3 * (params.contention**2 + params.two_node_penalty**2)
    return error + pulls + 1e-2 * (growth + params.growth_n**2)


def robust_rmse(errors: Numbers, weight: np.ndarray, rounding: float) -> Numbers:
    robust = 2 * 0.1**2 * (anp.sqrt(1 + (errors / 0.1) ** 2) - 1)
    return anp.sqrt(anp.sum(weight * robust) / np.sum(weight) + rounding**2)


def compare(shape: PerfParams, profile: Profile, values: np.ndarray, rounding: float) -> None:
    def by_formulas(numbers: np.ndarray) -> float:
        return loss(with_values(shape, numbers), profile, rounding)

    total, gradient = loss_and_gradient(values, make_rows(profile, shape), rounding)
    assert total == pytest.approx(by_formulas(values), rel=1e-9, abs=1e-12)
    assert total == pytest.approx(loss(with_values(shape, values.tolist()), profile, rounding))
    exact = gradient_of(by_formulas, values)
    # By size of the steps that a search takes: relative in the times, absolute in the others.
    steps = np.where(IS_TIME, np.maximum(values, 1e-3), 1.0)
    np.testing.assert_allclose(gradient * steps, exact * steps, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("checkpoint", "compute"),
    turns(["never", "except_last", "always"], ["all", "some", "none"]),
)
def test_the_gradient_is_autograds(checkpoint: Checkpoint, compute: str) -> None:
    rng = np.random.default_rng(len(checkpoint) * 10 + len(compute))
    for rounding in (1e-2, 1e-4, 1e-9) * 15:
        compare(
            random_shape(rng, checkpoint),
            random_profile(rng, compute),
            random_values(rng),
            rounding,
        )


@pytest.mark.parametrize("power", [-1.5, -0.01, -2e-4, 2e-4, 0.01, 0.5, 1.0, 1.7])
def test_the_gradient_by_growth(power: float) -> None:
    rng = np.random.default_rng(3)
    for _ in range(5):
        values = random_values(rng)
        values[NAMES.index("growth_n")] = power
        compare(BLANK, random_profile(rng, "none"), values, 1e-4)


@pytest.mark.parametrize("power", [-1e-4, -3e-5, -1e-9, 0.0, 1e-9, 3e-5, 1e-4])
def test_growth_is_smooth_around_a_logarithm(power: float) -> None:
    # Where the formula is 0/0, and autograd sees a constant: by differences over a wider step.
    rng = np.random.default_rng(4)
    at, step = NAMES.index("growth_n"), 1e-3
    for _ in range(5):
        profile, values = random_profile(rng, "none"), random_values(rng)
        values[at] = power
        rows = make_rows(profile, BLANK)
        total, gradient = loss_and_gradient(values, rows, 1e-4)
        assert total == pytest.approx(loss(with_values(BLANK, values.tolist()), profile, 1e-4))
        there = []
        for sign in (-1, 1):
            moved = values.copy()
            moved[at] += sign * step
            there.append(loss_and_gradient(moved, rows, 1e-4)[0])
        assert gradient[at] == pytest.approx((there[1] - there[0]) / (2 * step), rel=1e-3, abs=1e-7)


def test_a_perfect_fit_costs_nothing_and_is_flat() -> None:
    values = np.array(NEUTRAL)
    values[:6] = 0.1, 0.01, 0.3, 1e-8, 0.2, 1e-8
    values[NAMES.index("growth_n")] = 0.0
    nodes, replicas, sizes = np.array([1.0, 1, 2]), np.array([1.0, 2, 2]), np.array([8.0, 8, 16])
    accum = 0.1 + 0.01 * sizes
    network = np.array([1e-8, 0.2, 0.3])
    one = np.ones(3)
    profile = Profile(nodes, replicas, one, sizes, accum, accum + network, accum, one)
    rows = make_rows(profile, BLANK)
    total, gradient = loss_and_gradient(values, rows, 1e-9)
    assert total == pytest.approx(0.0, abs=1e-8)
    assert rmse(values, rows) == pytest.approx(0.0, abs=1e-14)
    assert np.all(np.isfinite(gradient))


def test_a_weight_counts_as_so_many_measurements() -> None:
    rng = np.random.default_rng(5)
    profile, values = random_profile(rng, "some"), random_values(rng)
    repeats = profile.weight.astype(int)
    spread = Profile(*(np.repeat(column, repeats) for column in profile[:7]), np.ones(sum(repeats)))
    weighted, one_each = (
        loss_and_gradient(values, make_rows(data, BLANK), 1e-4) for data in (profile, spread)
    )
    assert weighted[0] == pytest.approx(one_each[0])
    np.testing.assert_allclose(weighted[1], one_each[1], rtol=1e-9)


def test_the_loss_by_hand() -> None:
    # One point, off by e^0.2 in accumulation and e^-0.3 in optimizer steps; D = 0.1.
    one = np.ones(1)
    profile = Profile(one, one, one, 10 * one, 0.2 * one, 0.2 * one, np.nan * one, one)
    params = BLANK._replace(alpha_c=0.1 * np.exp(0.2), beta_c=0.01 * np.exp(0.2))
    profile = profile._replace(optim_time=0.2 * np.exp(0.5) * one)
    robust = [np.sqrt(0.02 * (np.sqrt(1 + (e / 0.1) ** 2) - 1)) for e in (0.2, 0.3)]
    # Priors: beta_n / alpha_n = beta_r / alpha_r = 1 and growth_n = 1, 1e-2 each.
    assert loss(params, profile) == pytest.approx(sum(robust) + 3e-2, abs=1e-6)
