"""Tests of fits with several network levels."""

import itertools

import numpy as np
import pytest
import scipy.optimize

from pipollux_perfmodel import (
    GoodputFunction,
    GradParams,
    PerfParams,
    SchedHints,
    SpeedupFunction,
    fit_perf_params,
    speedups_of,
)
from pipollux_perfmodel.fitting.fit import fit_measurements
from pipollux_perfmodel.fitting.loss import loss_and_gradient, make_rows
from pipollux_perfmodel.fitting.measurements import make_profile
from pipollux_perfmodel.goodput.corrections import StepCorrections, StepRatio, step_ratios
from pipollux_perfmodel.hints.codec import perf_params_from_json, perf_params_to_json
from pipollux_perfmodel.hints.step_rows import StepRow
from pipollux_perfmodel.timing.step_time import step_time
from tests.extent import first

TRUE = PerfParams(
    *(0.05, 0.01, 0.1, 0.01, 0.02, 0.002, 1.4), alpha_levels=(0.4, 0.9), beta_levels=(0.05, 0.2)
)


def measure(allocations, params=TRUE, sizes=(8, 16, 32)):
    """Return the arguments of a fit on (nodes, replicas, level), with exact times."""
    rows = [(*a, size) for a, size in itertools.product(allocations, sizes)]
    nodes, replicas, level, size = (np.array(column) for column in zip(*rows, strict=True))
    times = step_time(params, nodes, replicas, size, np.zeros_like(size), 1, level)
    return {
        "num_nodes": nodes,
        "num_replicas": replicas,
        "atomic_bsz": size,
        "accum_step_time": times.accum_time,
        "optim_step_time": times.optim_time,
        "level": level,
    }


def without_levels(data):
    return {name: values for name, values in data.items() if name != "level"}


LOCAL = [(1, 1, 1), (1, 2, 1), (1, 4, 1)]
RACK = [(2, 2, 1), (2, 4, 1), (4, 8, 1)]
ZONE = [(2, 2, 2), (4, 4, 2), (8, 8, 2)]
FAR = [(2, 2, 3), (4, 4, 3), (8, 8, 3)]


def test_every_measured_level_gets_its_own_cost():
    found = fit_perf_params(**measure(LOCAL + RACK + ZONE + FAR))
    for level, (nodes, replicas) in itertools.product((1, 2, 3), ((2, 2), (4, 8), (8, 16))):
        cost, true = (
            float(step_time(p, nodes, replicas, 16, 0, 1, level).optim_time) for p in (found, TRUE)
        )
        assert cost == pytest.approx(true, rel=0.05), (level, replicas)
    assert len(found.alpha_levels) == len(found.beta_levels) == 2


@pytest.mark.parametrize("level", first(1, [2, 1, 3]))
def test_one_level_is_fitted_as_without_levels(level):
    """Equal to the last digit, whatever number the level has."""
    data = measure(LOCAL + [(n, r, level) for n, r, _ in RACK])
    found, plain = fit_perf_params(**data), fit_perf_params(**without_levels(data))
    assert found.at_level(level) == plain
    assert plain.alpha_levels == ()
    if level == 1:
        assert found == plain


def test_a_fit_that_saw_one_rack_is_optimistic_about_the_others():
    found = fit_perf_params(**measure(LOCAL + RACK))
    assert found.at_level(2) == found.at_level(1) == found


@pytest.mark.exhaustive
def test_a_fit_that_saw_other_racks_only_is_optimistic_about_one_rack():
    found = fit_perf_params(**measure(LOCAL + ZONE))
    assert found.alpha_n == pytest.approx(1.1 * found.alpha_r)
    assert found.alpha_n <= found.alpha_levels[0] == pytest.approx(0.4, rel=0.1)
    # Without replicas that shared a node, the network inside a rack is free, as in Pollux.
    nothing_below = fit_perf_params(**measure([(1, 1, 1), *ZONE]))
    assert nothing_below.alpha_n < 2e-8


def test_a_level_between_measured_ones_costs_as_the_next_lower_one():
    found = fit_perf_params(**measure(LOCAL + RACK + FAR))
    assert found.alpha_levels[0] == found.alpha_n
    assert found.beta_levels[0] == found.beta_n
    assert found.alpha_levels[1] > 4 * found.alpha_n


def test_growth_that_was_not_measured_is_that_of_the_next_lower_level():
    found = fit_perf_params(**measure([*LOCAL, *RACK, (2, 2, 2)]))
    assert found.beta_levels == (found.beta_n,)
    assert found.beta_n > 1e-3


@pytest.mark.exhaustive
def test_levels_of_one_node_do_not_matter():
    data = measure(LOCAL + RACK)
    strange = {**data, "level": np.where(data["num_nodes"] == 1, 7, data["level"])}
    assert fit_perf_params(**strange) == fit_perf_params(**data)


@pytest.mark.parametrize("seed", range(5))
def test_the_gradient_of_the_loss(seed):
    """Against finite differences, with three levels."""
    rng = np.random.default_rng(seed)
    data = measure(LOCAL + RACK + ZONE + FAR)
    for name in ("accum_step_time", "optim_step_time"):
        data[name] = data[name] * rng.uniform(0.8, 1.2, len(data[name]))
    level = data.pop("level")
    rows = make_rows(make_profile(*data.values(), None, None, level), TRUE)
    values = np.array([*TRUE[:7], 1.0, 1.1, 0.1, 0.3, 0.2, 0.01, 0.4, 0.05, 0.9, 0.2])
    values *= rng.uniform(0.9, 1.1, len(values))
    values[6] = max(values[6], 1.0)
    _, gradient = loss_and_gradient(values, rows, 1e-3)
    numeric = scipy.optimize.approx_fprime(
        values, lambda x: loss_and_gradient(x, rows, 1e-3)[0], 1e-7
    )
    np.testing.assert_allclose(gradient, numeric, rtol=1e-3, atol=1e-5)
    assert (gradient[13:] != 0).all()


@pytest.mark.exhaustive
def test_the_report_has_an_error_per_level_and_names_the_assumed_one():
    report = fit_measurements(**measure(LOCAL + RACK + ZONE)).report
    names = {regime.name: regime.mean_error for regime in report.regimes}
    assert {"network level 1", "network level 2"} <= names.keys()
    assert max(names.values()) < 0.05
    report = fit_measurements(**measure(LOCAL + ZONE)).report
    assert "level 1" in next(x.reason for x in report.assumed if x.parameter == "alpha_n")


@pytest.mark.parametrize("level", [0, 9, 1.5])
def test_an_impossible_level_is_an_error(level):
    data = {**measure(RACK), "level": level}
    with pytest.raises(ValueError, match="level has"):
        fit_perf_params(**data)


def test_levels_survive_json_and_old_json_has_none():
    assert perf_params_from_json(perf_params_to_json(TRUE)) == TRUE
    plain = TRUE.at_level(1)
    assert "alpha_levels" not in perf_params_to_json(plain)
    with pytest.raises(ValueError, match="beta_levels"):
        GoodputFunction(TRUE._replace(beta_levels=()), (1.0, 8.0), 32)


def test_a_row_has_a_level_only_above_the_lowest():
    row = StepRow(
        num_stages=1,
        num_nodes=2,
        num_replicas=2,
        atomic_bsz=8,
        num_microbatches=1,
        accum_step_time=0.1,
        optim_step_time=0.2,
    )
    assert "level" not in row.model_dump(by_alias=True)
    far = row.model_copy(update={"level": 2})
    assert StepRow.model_validate(far.model_dump(by_alias=True)) == far
    assert far.configuration != row.configuration


def speedup_of(params, **settings):
    goodput_fn = GoodputFunction(params, (1.0, 80.0), 32)
    return SpeedupFunction(goodput_fn, 1024, (8, 64), accumulation=True, **settings)


def test_speedups_by_level_have_one_base():
    whole = speedup_of(TRUE)
    nodes, replicas = np.array([1, 2, 4, 8]), np.array([1, 4, 8, 16])
    for level in (1, 2, 3):
        alone = speedup_of(TRUE.at_level(level))
        np.testing.assert_array_equal(
            whole.at_level(level)(nodes, replicas), alone(nodes, replicas)
        )
    assert whole.at_level(1) is whole
    assert whole.num_levels == 3
    assert alone.num_levels == 1
    assert whole.at_level(9) is whole.at_level(3)
    assert whole.at_level(2)(2, 4) > whole.at_level(3)(2, 4)
    fresh = speedup_of(TRUE)
    many = speedups_of((fresh.at_level(level), nodes, replicas) for level in (3, 1, 2))
    np.testing.assert_array_equal(many[0], whole.at_level(3)(nodes, replicas))


def test_jobs_with_different_levels_are_computed_together():
    slower = TRUE._replace(alpha_n=0.3, alpha_levels=(0.5,), beta_levels=(0.1,))
    replicas = np.arange(2, 20)
    nodes = np.full_like(replicas, 2)
    asked = [(p, level) for p in (TRUE, slower, TRUE.at_level(2)) for level in (1, 2, 3)]
    together = speedups_of((speedup_of(p).at_level(x), nodes, replicas) for p, x in asked)
    for (params, level), found in zip(asked, together, strict=True):
        np.testing.assert_array_equal(found, speedup_of(params).at_level(level)(nodes, replicas))


def test_a_model_without_levels_costs_nothing_more():
    plain = speedup_of(TRUE.at_level(1))
    assert plain.at_level(2) is plain


def test_corrections_apply_to_their_level():
    data = measure(RACK + ZONE, sizes=(16,))
    data["optim_step_time"] = data["optim_step_time"] * np.where(data["level"] == 2, 1.2, 1.0)
    ratios = step_ratios(
        TRUE,
        *(data[name] for name in ("num_nodes", "num_replicas", "atomic_bsz", "optim_step_time")),
        level=data["level"],
    )
    assert {(r.level, r.ratio) for r in ratios} == {(1, 1.0), (2, 1.2)}
    corrections = StepCorrections(ratios)
    assert corrections.factors(4, 4, 2) == pytest.approx(1 / 1.2)
    assert corrections.factors(4, 8, 1) == pytest.approx(1)
    hints = SchedHints(
        init_batch_size=32,
        max_batch_size=1024,
        perf_params=TRUE,
        grad_params=GradParams(1.0, 80.0),
        step_ratios=[(2, 4, 1.0), StepRatio(2, 4, 1.25, 2)],
    )
    again = SchedHints.from_json_object(hints.to_json_object())
    assert again == hints
    speedup_fn = again.speedup_function()
    uncorrected = hints.model_copy(update={"step_ratios": None}).speedup_function()
    ratio = speedup_fn.at_level(2)(2, 4) / uncorrected.at_level(2)(2, 4)
    assert ratio == pytest.approx(1 / 1.25)
