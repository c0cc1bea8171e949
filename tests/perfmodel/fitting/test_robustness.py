"""Fits of what real jobs measure: stragglers, little data, any scale, anything that is a time."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_perfmodel import (
    PerfParams,
    fit_like_adaptdl,
    fit_measurements,
    fit_perf_params,
)
from pipollux_perfmodel.fitting.fit import _LIMITS
from pipollux_perfmodel.fitting.loss import NAMES
from pipollux_perfmodel.fitting.measurements import make_profile, stage_shares
from pipollux_perfmodel.fitting.report import make_report
from tests.extent import examples, first, first_points, turns
from tests.perfmodel.measured import Steps, errors, measure, random_jobs

TRUTH = PerfParams(0.05, 0.004, 0.12, 0.004, 0.04, 0.002, 1.5)


def fit(steps: Steps) -> PerfParams:
    return fit_perf_params(*steps[:5], num_microbatches=steps.num_microbatches)


@pytest.mark.parametrize(("noise", "seed"), turns([0.0, 0.02, 0.05], range(4)))
def test_stragglers_are_named_and_do_not_mislead(noise: float, seed: int) -> None:
    clean, measured = (measure(TRUTH, noise=level, seed=seed) for level in (0.0, noise))
    count = len(clean.accum) // 20
    slow = np.sort(np.random.default_rng(seed).choice(len(clean.accum), count, replace=False))
    measured = measured.change(slow[:1], accum=10.0).change(slow[1:], optim=10.0)
    found = fit_measurements(*measured[:5])
    assert found.report.outliers == tuple(slow.tolist())
    off = errors(found.perf_params, clean)
    assert off.mean() < 0.03 + noise / 2
    assert off.max() < 0.08 + 2 * noise
    assert all(regime.worst_error < 0.3 for regime in found.report.regimes)


@pytest.mark.exhaustive
def test_stragglers_turn_a_fit_of_squares() -> None:
    # So the test above can fail: AdaptDL's loss does not resist ten times the time.
    clean = measure(TRUTH)
    slow = clean.change([11, 30], optim=10.0)
    assert errors(fit_like_adaptdl(*clean[:5]), clean).max() < 0.1
    assert errors(fit_like_adaptdl(*slow[:5]), clean).max() > 3 * errors(fit(slow), clean).max()


def test_a_straggler_among_repeats_is_outvoted() -> None:
    once = measure(TRUTH, noise=0.02)
    often = Steps(*(np.repeat(column, 3) for column in once))
    often = often.change(slice(0, None, 3), accum=10.0, optim=10.0)
    assert fit(often) == fit(once)
    named = fit_measurements(*often[:5]).report.outliers
    assert named == tuple(range(0, len(often.accum), 3))


def test_repeated_measurements_are_one_of_more_weight() -> None:
    once = measure(TRUTH, noise=0.05)
    same = Steps(*(np.tile(column, 3) for column in once))
    assert fit(same) == fit(once)
    # Ten times the same steps pull predictions towards them.
    alone = errors(fit(once), once)[1]
    worst = int(np.argmax(alone))
    rows = np.append(np.arange(len(alone)), [worst] * 30)
    assert (
        errors(fit(Steps(*(column[rows] for column in once))), once)[1][worst] < 0.8 * alone[worst]
    )


def test_order_does_not_matter() -> None:
    steps = measure(TRUTH, noise=0.05)
    order = np.random.default_rng(0).permutation(len(steps.accum))
    np.testing.assert_allclose(
        errors(fit(steps), steps),
        errors(fit(Steps(*(column[order] for column in steps))), steps),
        atol=1e-4,
    )


@pytest.mark.parametrize(
    ("scale", "noise"),
    first_points(
        2,
        [(1e-4, 0.0), (1e3, 0.03), (1e-4, 0.03), (1e3, 0.0), *product([1e-2, 10.0], [0.0, 0.03])],
    ),
)
def test_times_of_any_scale(scale: float, noise: float) -> None:
    # From steps of 10 µs to half an hour.
    steps = measure(TRUTH, noise=noise)
    scaled = steps._replace(accum=steps.accum * scale, optim=steps.optim * scale)
    one, other = fit(steps), fit(scaled)
    np.testing.assert_allclose(errors(other, scaled), errors(one, steps), atol=1e-3)
    large = np.array(one[:6]) > 1e-3
    np.testing.assert_allclose(
        np.array(other[:6])[large] / scale, np.array(one[:6])[large], rtol=5e-3
    )
    assert other[6] == pytest.approx(one[6], abs=5e-3)


def test_steps_of_a_hundred_nanoseconds_have_a_floor_and_no_more() -> None:
    # Parameters of a few nanoseconds are at the least that there is, 1e-8 s.
    steps = measure(TRUTH)
    tiny = steps._replace(accum=steps.accum * 1e-6, optim=steps.optim * 1e-6)
    found = fit(tiny)
    assert min(found[:6]) >= 1e-8
    assert np.all(np.isfinite(errors(found, tiny)))


@pytest.mark.parametrize(
    "rows",
    first(
        5,
        [
            [(1, 1, 8, 0.1, 0.1), (1, 1, 16, 0.15, 0.15)],
            [(1, 1, 8, 0.1, 0.1), (1, 2, 8, 0.1, 0.12)],
            [(1, 1, 8, 0.1, 0.1), (1, 2, 16, 0.15, 0.17), (2, 2, 8, 0.1, 0.2)],
            [(3, 6, 4, 0.1, 0.3)],
            [(1, 1, 8, 0.1, 0.1), (4, 8, 8, 0.1, 0.3)],
            [(2, 2, 8, 0.1, 0.12), (2, 4, 8, 0.1, 0.14)],
        ],
    ),
    ids=str,
)
def test_two_or_three_points_are_met(rows: list[tuple[float, ...]]) -> None:
    columns = np.array(rows).T
    steps = Steps(*columns, np.ones(len(rows)))
    found = fit(steps)
    assert errors(found, steps).max() < 2e-3
    check(found)


def test_one_batch_size_only() -> None:
    steps = measure(TRUTH, sizes=[32], noise=0.02)
    found = fit(steps)
    assert found.alpha_c == pytest.approx(found.beta_c * 32, rel=0.05)  # half of the step is fixed
    assert errors(found, measure(TRUTH, sizes=[32])).max() < 0.03


def test_times_that_are_all_the_same() -> None:
    steps = measure(TRUTH)
    steps = steps._replace(
        accum=np.full_like(steps.accum, 0.2), optim=np.full_like(steps.accum, 0.2)
    )
    found = fit(steps)
    assert errors(found, steps).max() < 1e-3
    assert found.beta_c * max(steps.atomic_bsz) < 1e-3


def test_optimizer_steps_faster_than_accumulation_steps() -> None:
    steps = measure(TRUTH)
    steps = steps._replace(optim=0.8 * steps.accum)
    found = fit(steps)
    check(found)
    # No network is fast enough; the two kinds of steps share the error.
    assert errors(found, steps).max() < 0.25
    assert max(found.alpha_n, found.alpha_r) < 0.01


COUNTS = st.integers(1, 6)
SECONDS = st.floats(np.log(1e-6), np.log(1e4)).map(lambda x: float(np.exp(x)))


@st.composite
def anything(draw: st.DrawFn) -> dict[str, Any]:
    """Any valid measurements, however absurd."""
    points, stages = draw(st.integers(1, 12)), draw(st.integers(1, 3))

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=points, max_size=points))

    nodes, per_node = column(COUNTS), column(COUNTS)
    data: dict[str, Any] = {
        "num_nodes": nodes,
        "num_replicas": [n * p for n, p in zip(nodes, per_node, strict=True)],
        "atomic_bsz": column(st.integers(1, 512)),
        "accum_step_time": column(SECONDS),
        "optim_step_time": column(SECONDS),
        "num_microbatches": column(st.integers(1, 16)),
        "num_stages": stages,
        "checkpoint": draw(st.sampled_from(["never", "except_last", "always"])),
    }
    if draw(st.booleans()):
        times = st.lists(st.one_of(SECONDS, st.just(0.0)), min_size=stages, max_size=stages)
        absent = st.just([float("nan")] * stages)
        for name in ("forward", "backward"):
            data[name] = column(st.one_of(times, absent))
    return data


@examples(16, 100)
@given(anything())
def test_any_measurements_give_parameters(data: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fit_measurements(**data)
    check(found.perf_params)
    assert found.perf_params.num_stages == data["num_stages"]
    assert all(0 <= row < len(data["num_nodes"]) for row in found.report.outliers)
    assert all(np.isfinite(regime.mean_error) for regime in found.report.regimes)


def check(params: PerfParams) -> None:
    """Every number is finite and within its bounds."""
    assert all(np.isfinite(value) for value in params[:7])
    assert min(params[:6]) >= 1e-8 * (1 - 1e-9)
    assert params.overhead >= 0
    for name, (low, high) in _LIMITS.items():
        assert low <= getattr(params, name) <= high, name


@pytest.mark.parametrize(
    ("rows", "told", "reasons"),
    [
        ([(1, 1, 8)], {"beta_c"}, {"alpha_c": "one micro-batch size", "gamma": "fewer than two"}),
        ([(1, 1, 8), (1, 1, 16)], {"alpha_c", "beta_c"}, {"alpha_r": "never several replicas"}),
        (
            [(1, 1, 8), (1, 2, 8), (1, 2, 16)],
            {"alpha_c", "beta_c", "alpha_r", "gamma", "contention"},
            {"beta_r": "never more than two", "alpha_n": "never ran on several nodes"},
        ),
        (
            [(1, 2, 8), (1, 4, 16)],
            {"alpha_c", "beta_c", "alpha_r", "beta_r", "gamma", "contention"},
            {"gamma_c": "fewer than four micro-batch sizes"},
        ),
        (
            [(2, 2, 4), (2, 2, 8), (2, 2, 16), (2, 2, 32)],
            {"alpha_c", "beta_c", "alpha_n", "gamma", "gamma_c"},
            {"beta_n": "never more than two", "contention": "one number of replicas per node"},
        ),
        (
            [(2, 2, 4), (2, 4, 8), (3, 3, 16)],
            {
                "alpha_c",
                "beta_c",
                "alpha_n",
                "beta_n",
                "gamma",
                "contention",
                "growth_n",
                "two_node_penalty",
            },
            {"alpha_r": "never several replicas on one node"},
        ),
        (
            [(2, 4, 4), (2, 6, 8), (2, 4, 8), (2, 6, 4)],
            {"alpha_c", "beta_c", "alpha_n", "beta_n", "gamma", "contention"},
            {
                "growth_n": "fewer than three numbers of replicas",
                "two_node_penalty": "were not compared",
            },
        ),
    ],
    ids=lambda value: str(sorted(value)),
)
def test_the_report_names_what_rests_on_priors(
    rows: list[tuple[int, int, int]], told: set[str], reasons: dict[str, str]
) -> None:
    nodes, replicas, sizes = np.array(rows).T
    # Not so even that AdaptDL's numbers are enough.
    optim = 0.1 + 0.01 * sizes + (0.2 + 0.02 * replicas) * (replicas > 1)
    optim = optim * np.where(np.arange(len(rows)) % 3, 1.1, 1.0)
    found = fit_measurements(nodes, replicas, sizes, 0.1 + 0.01 * sizes, optim)
    # With one stage and one micro-batch there is neither overlap nor a step beside it.
    every = set(NAMES) - {"overlap", "overhead"}
    assumed = {assumption.parameter: assumption for assumption in found.report.assumed}
    assert set(assumed) - {"overhead"} == every - told
    for name, reason in reasons.items():
        assert reason in assumed[name].reason
    for name, assumption in assumed.items():
        assert assumption.value == getattr(found.perf_params, name)
    check_priors(found.perf_params, set(assumed))


def check_priors(params: PerfParams, assumed: set[str]) -> None:
    """What is assumed is what the table in `priors` says."""
    neutral = {
        "gamma_c": 1.0,
        "gamma": 1.0,
        "contention": 0.0,
        "two_node_penalty": 0.0,
        "overhead": 0.0,
        "alpha_r": 1e-8,
        "beta_r": 1e-8,
    }
    for name, value in neutral.items():
        if name in assumed:
            assert getattr(params, name) == pytest.approx(value), name
    if "alpha_n" in assumed:
        assert params.alpha_n == pytest.approx(max(1e-8, 1.1 * params.alpha_r))
        assert params.beta_n == pytest.approx(max(1e-8, 1.1 * params.beta_r))
    elif "beta_n" in assumed:
        assert params.beta_n == pytest.approx(1e-8)
    if "growth_n" in assumed:
        assert params.growth_n == (1.0 if "beta_n" in assumed else 0.0)


@pytest.mark.parametrize(
    ("microbatches", "measured", "assumed"),
    first_points(
        2, [([4], False, True), ([2, 4], False, False), ([4], True, False), ([1], True, True)]
    ),
)
def test_overlap_rests_on_a_prior_unless_it_was_told(
    microbatches: list[int], measured: bool, assumed: bool
) -> None:
    truth = TRUTH._replace(forward_shares=(0.15, 0.15), backward_shares=(0.35, 0.35))
    steps = measure(truth, microbatches=microbatches, sizes=[8, 16])
    stages: dict[str, Any] = {}
    if measured:
        compute = (truth.alpha_c + truth.beta_c * steps.atomic_bsz / steps.num_microbatches)[
            :, None
        ]
        stages = {"forward": 0.15 * compute.repeat(2, 1), "backward": 0.35 * compute.repeat(2, 1)}
    found = fit_measurements(
        *steps[:5], num_microbatches=steps.num_microbatches, num_stages=2, **stages
    )
    names = {assumption.parameter for assumption in found.report.assumed}
    assert ("overlap" in names) == assumed
    assert found.perf_params.overlap == pytest.approx(1.0)


def test_the_report_measures_each_regime() -> None:
    steps = measure(TRUTH)
    profile = make_profile(*steps[:5], None, None)
    # Accumulation 10 % slower than predicted, and steps over two nodes 20 %.
    two = steps.num_nodes == 2
    slower = profile._replace(
        accum_time=1.1 * profile.accum_time,
        optim_time=np.where(two, 1.2, 1.0) * profile.optim_time,
    )
    report = make_report(TRUTH, slower, TRUTH)
    expected = {
        "accumulation steps": (40, 1 - 1 / 1.1),
        "one replica": (5, 0.0),
        "one node": (10, 0.0),
        "two nodes": (15, 1 - 1 / 1.2),
        "three or more nodes": (10, 0.0),
    }
    assert [regime.name for regime in report.regimes] == list(expected)
    for regime in report.regimes:
        count, error = expected[regime.name]
        assert regime.num_measurements == count
        assert regime.mean_error == pytest.approx(error, abs=1e-9)
        assert regime.worst_error == pytest.approx(error, abs=1e-9)
    assert report.outliers == ()


def test_random_jobs_have_no_outliers() -> None:
    for job in random_jobs(10):
        steps = measure(job.truth, *job[1:], noise=0.05)
        assert fit_measurements(*steps[:5]).report.outliers == ()


def test_stages_that_were_idle_in_most_points_share_by_their_means() -> None:
    """Of three points each was one stage's: the median of every stage is nothing."""
    times = np.eye(3)
    forward, backward, _ = stage_shares(times, times, 3)
    assert forward == pytest.approx((1 / 6,) * 3)
    assert backward == pytest.approx((1 / 6,) * 3)
