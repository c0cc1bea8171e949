"""Fitting pipelines: overlap and step times are recovered, from little data, in any thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest

from pipollux_perfmodel import (
    FitResult,
    GoodputFunction,
    PerfParams,
    fit_like_adaptdl,
    fit_measurements,
    fit_perf_params,
)
from pipollux_perfmodel.timing.params import Checkpoint
from pipollux_perfmodel.timing.step_time import slowdown, stage_times
from tests.extent import first, first_points, grid, turns
from tests.perfmodel.measured import Steps, errors
from tests.perfmodel.measured import measure as measure_steps

TRUTH = PerfParams(0.02, 0.003, 0.05, 0.004, 0.01, 0.002, 1.6, (0.1, 0.2, 0.1), (0.25, 0.2, 0.15))
ALLOCATIONS = [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (3, 6)]


def measure(
    truth: PerfParams, microbatches: list[int], sizes: list[int], noise: float = 0.0
) -> dict[str, Any]:
    """The arguments of a fit as a job of these parameters measures them."""
    rows = [(*a, m * b, m) for a in ALLOCATIONS for m in microbatches for b in sizes]
    nodes, replicas, atomic_bsz, num_microbatches = np.array(rows).T
    times = GoodputFunction(truth, (1.0, 1.0), 1).step_time(
        nodes, replicas, atomic_bsz, 0, num_microbatches
    )
    jitter = np.exp(noise * np.random.default_rng(1).normal(size=(3, len(rows))))
    return {
        "num_nodes": nodes,
        "num_replicas": replicas,
        "atomic_bsz": atomic_bsz,
        "accum_step_time": times.accum_time * jitter[0],
        "optim_step_time": times.optim_time * jitter[1],
        "num_microbatches": num_microbatches,
        "forward_shares": truth.forward_shares,
        "backward_shares": truth.backward_shares,
        "compute_time": (truth.alpha_c + truth.beta_c * atomic_bsz / num_microbatches) * jitter[2],
    }


def worst_error(params: PerfParams, data: dict[str, Any]) -> float:
    times = GoodputFunction(params, (1.0, 1.0), 1).step_time(
        data["num_nodes"],
        data["num_replicas"],
        data["atomic_bsz"],
        0,
        data["num_microbatches"],
    )
    errors = (
        np.log(times.accum_time / data["accum_step_time"]),
        np.log(times.optim_time / data["optim_step_time"]),
    )
    return float(np.abs(errors).max())


@pytest.mark.parametrize(
    ("overlap", "told_by"),
    first_points(
        2,
        [
            *[(0.35, "compute times"), (0.8, "micro-batches"), (0.35, "both"), (0.8, "both")],
            *[(0.35, "micro-batches"), (0.8, "compute times")],
            *product([0.0, 1.0], ["micro-batches", "compute times", "both"]),
        ],
    ),
)
def test_overlap_is_recovered(overlap: float, told_by: str) -> None:
    truth = TRUTH._replace(overlap=overlap)
    microbatches = [4] if told_by == "compute times" else [2, 4, 8]
    data = measure(truth, microbatches, [2, 8, 32])
    if told_by == "micro-batches":
        del data["compute_time"]
    found = fit_perf_params(**data)
    assert found.overlap == pytest.approx(overlap, abs=0.01)
    assert found.alpha_c == pytest.approx(truth.alpha_c, rel=0.01)
    assert found.beta_c == pytest.approx(truth.beta_c, rel=0.01)
    assert worst_error(found, data) < 5e-3
    assert found.forward_shares == truth.forward_shares


@pytest.mark.parametrize(
    ("overlap", "checkpoint"),
    first_points(1, [*product([1.0, 0.35], ["except_last", "never"])]),
)
def test_1f1b_is_recovered_where_it_is_known_to_have_run(
    overlap: float, checkpoint: Checkpoint
) -> None:
    truth = TRUTH._replace(
        overlap=overlap,
        checkpoint=checkpoint,
        schedule="1f1b",
        # GPipe would take a third longer.
        forward_shares=(0.3, 0.05, 0.05),
        backward_shares=(0.1, 0.2, 0.3),
    )
    data = measure(truth, [2, 4, 8], [2, 8, 32])
    found = fit_perf_params(**data, checkpoint=checkpoint, schedule="1f1b")
    assert found.schedule == "1f1b"
    assert found.overlap == pytest.approx(overlap, abs=0.01)
    assert worst_error(found, data) < 5e-3
    taken_for_gpipe = fit_perf_params(**data, checkpoint=checkpoint)
    assert worst_error(taken_for_gpipe, data) > 5e-3


def test_overlap_is_one_where_nothing_tells_it() -> None:
    data = measure(TRUTH._replace(overlap=0.2), [4], [2, 8, 32])
    del data["compute_time"]
    found = fit_perf_params(**data)
    assert found.overlap == 1.0
    assert worst_error(found, data) < 5e-3  # slower compute explains the same times


def test_a_few_compute_times_are_enough() -> None:
    data = measure(TRUTH._replace(overlap=0.5), [4], [2, 8, 32])
    data["compute_time"][3:] = np.nan
    assert fit_perf_params(**data).overlap == pytest.approx(0.5, abs=0.01)


def test_noise_does_not_mislead() -> None:
    data = measure(TRUTH._replace(overlap=0.5), [2, 4, 8], [2, 8, 32], noise=0.03)
    found = fit_perf_params(**data)
    assert found.overlap == pytest.approx(0.5, abs=0.08)
    assert found.gamma == pytest.approx(1.6, abs=0.4)
    exact = measure(TRUTH._replace(overlap=0.5), [2, 4, 8], [2, 8, 32])
    assert worst_error(found, exact) < 0.05


def test_stages_one_after_another_with_overhead() -> None:
    # Steps take longer than all stages in a row: more than no overlap explains. Steps count.
    data = measure(TRUTH._replace(overlap=0.0), [4], [2, 8, 32])
    data["compute_time"] = data["compute_time"] / 1.3
    found = fit_perf_params(**data)
    assert found.overlap == pytest.approx(0.0, abs=1e-6)
    assert worst_error(found, data) < 5e-3


def test_one_stage_does_not_look_at_compute_times() -> None:
    data = measure(TRUTH._replace(forward_shares=(0.4,), backward_shares=(0.6,)), [2], [4, 8])
    skewed = fit_perf_params(**(data | {"compute_time": data["compute_time"] / 2}))
    assert skewed == fit_perf_params(**data)
    assert skewed.overlap == 1.0


@pytest.mark.parametrize(
    ("copies", "allocation", "num_microbatches"),
    grid([1, 3], [(1, 1), (1, 2), (2, 2), (2, 3)], [1, 4]),
)
def test_one_configuration_is_enough(
    copies: int, allocation: tuple[int, int], num_microbatches: int
) -> None:
    nodes, replicas = allocation
    optim = 0.12 if replicas > 1 else 0.1
    found = fit_perf_params(
        [nodes] * copies,
        [replicas] * copies,
        [8] * copies,
        [0.1] * copies,
        [optim] * copies,
        num_microbatches=[num_microbatches] * copies,
    )
    times = GoodputFunction(found, (1.0, 1.0), 1).step_time(nodes, replicas, 8, 0, num_microbatches)
    assert times.accum_time == pytest.approx(0.1, rel=1e-3)
    assert times.optim_time == pytest.approx(optim, rel=1e-3)
    assert found.gamma == 1.0
    assert found.alpha_c == pytest.approx(0.1 / num_microbatches / 2)
    # What was not seen looks free: more replicas must look worth a try.
    throughput = GoodputFunction(found, (1.0, 1.0), 1).throughput
    assert throughput(1, 2 * replicas, 8, 0) > 1.2 * throughput(nodes, replicas, 8, 0)


def test_optimizer_steps_faster_than_accumulation_steps_are_noise() -> None:
    found = fit_perf_params([1, 1, 2], [1, 2, 2], [8, 8, 16], [0.1, 0.1, 0.2], [0.1, 0.09, 0.19])
    assert np.all(np.isfinite(found[:7]))
    assert found.alpha_r < 0.02


def test_threads_do_not_disturb_each_other() -> None:
    sets = [
        measure(TRUTH._replace(overlap=w), [2, 4], [2, 8], noise=0.02) for w in (0.1, 0.4, 0.7, 1.0)
    ]
    alone = [fit_perf_params(**data) for data in sets]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda i: fit_perf_params(**sets[i % 4]), range(8), timeout=240))
    assert together == alone * 2


def stages_of(truth: PerfParams, steps: Steps, noise: float, seed: int) -> dict[str, Any]:
    """Times of the stages, as timers around them have it; arguments of `fit_measurements`."""
    rng = np.random.default_rng(seed + 100)
    times = stage_times(truth, steps.atomic_bsz / steps.num_microbatches)
    slow = slowdown(truth, steps.num_nodes, steps.num_replicas)
    forward, backward = (np.stack(part, axis=1) * slow[:, None] for part in times[:2])
    jitter = np.exp(noise * rng.normal(size=(2, *forward.shape)))
    return {"forward": forward * jitter[0], "backward": backward * jitter[1]}


def fit_stages(steps: Steps, truth: PerfParams, **stages: Any) -> FitResult:
    return fit_measurements(
        *steps[:5],
        num_microbatches=steps.num_microbatches,
        num_stages=truth.num_stages,
        checkpoint=truth.checkpoint,
        **stages,
    )


@pytest.mark.parametrize(
    ("checkpoint", "overlap", "noise"),
    turns(["never", "except_last", "always"], [0.0, 0.35, 1.0], [0.0, 0.03]),
)
def test_pipelines_are_recovered_from_stage_times(
    checkpoint: Checkpoint, overlap: float, noise: float
) -> None:
    truth = TRUTH._replace(checkpoint=checkpoint, overlap=overlap)
    exact, steps = (measure_steps(truth, ALLOCATIONS, [2, 8, 32], [4], noise=x) for x in (0, noise))
    found = fit_stages(steps, truth, **stages_of(truth, steps, noise, seed=0)).perf_params
    assert found.overlap == pytest.approx(overlap, abs=1e-3 + noise)
    np.testing.assert_allclose(found.forward_shares, truth.forward_shares, atol=1e-9 + noise / 10)
    np.testing.assert_allclose(found.backward_shares, truth.backward_shares, atol=1e-9 + noise / 10)
    assert errors(found, exact).max() < 1e-5 + 2.5 * noise
    # And of numbers of micro-batches that never ran.
    unseen = measure_steps(truth, [(1, 1)], [2, 8, 32], [1, 2, 16])
    assert errors(found, unseen).max() < 1e-5 + 2.5 * noise


@pytest.mark.parametrize(("overlap", "noise"), turns([0.35, 1.0, 0.0], [0.0, 0.03]))
def test_pipelines_are_recovered_from_steps_of_several_numbers_of_micro_batches(
    overlap: float, noise: float
) -> None:
    # Stages are thought to be equally slow, and the overlap says how much is gained from them.
    truth = TRUTH._replace(overlap=overlap)
    exact, steps = (
        measure_steps(truth, ALLOCATIONS, [2, 8, 32], [1, 2, 4, 8], noise=x) for x in (0, noise)
    )
    found = fit_stages(steps, truth).perf_params
    even = 1 - 1 / truth.num_stages
    uneven = 1 - max(truth.forward_shares) - max(truth.backward_shares)
    assert found.overlap == pytest.approx(overlap * uneven / even, abs=1e-3 + noise)
    assert errors(found, exact).max() < 1e-5 + 2.5 * noise
    unseen = measure_steps(truth, [(1, 1)], [2, 8, 32], [16])
    assert errors(found, unseen).max() < 1e-5 + 2.5 * noise


@pytest.mark.parametrize("overlap", [0.0, 0.8])
def test_except_last_without_stage_times_is_nearly_recovered(overlap: float) -> None:
    # What the last micro-batch saves depends on the stages, which are not as even as assumed.
    truth = TRUTH._replace(checkpoint="except_last", overlap=overlap)
    steps = measure_steps(truth, ALLOCATIONS, [2, 8, 32], [1, 2, 4, 8])
    off = errors(fit_stages(steps, truth).perf_params, steps)
    assert off.mean() < 0.03
    assert off.max() < 0.1


# Enough to tell everything beyond AdaptDL's seven numbers.
MANY = [
    *[(1, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (2, 8), (2, 16)],
    *[(3, 6), (4, 8), (4, 16), (8, 32), (16, 64)],
]
PLAIN = PerfParams(0.05, 0.002, 0.12, 0.03, 0.04, 0.004, 1.5)


@pytest.mark.parametrize(
    ("name", "value", "tolerance"),
    first_points(
        4,
        [
            ("contention", 0.05, 0.01),
            ("gamma_c", 2.0, 0.2),
            ("growth_n", 0.0, 0.1),
            ("two_node_penalty", 0.5, 0.1),
            ("contention", 0.2, 0.02),
            ("gamma_c", 4.0, 1.0),  # nearly the larger of both, as from three on
            ("growth_n", 0.5, 0.1),
            ("growth_n", 1.0, 0.1),
            ("two_node_penalty", 1.5, 0.15),
        ],
    ),
)
def test_what_is_beyond_adaptdls_model_is_recovered(
    name: str, value: float, tolerance: float
) -> None:
    truth = PLAIN._replace(**{name: value})
    for noise, seeds in ((0.0, [0]), (0.05, [0, 1, 2])):
        for seed in seeds:
            sizes = [4, 8, 16, 32, 64, 128]
            steps = measure_steps(truth, MANY, sizes, noise=noise, seed=seed)
            found = fit_perf_params(*steps[:5])
            allowed = tolerance if noise else 5e-3
            assert getattr(found, name) == pytest.approx(value, abs=allowed)
            off = errors(found, measure_steps(truth, MANY, sizes))
            assert off.mean() < (0.02 if noise else 1e-4)
            assert off.max() < (0.1 if noise else 1e-3)


@pytest.mark.parametrize("seed", first(1, range(4)))
def test_growth_goes_on_as_it_began(seed: int) -> None:
    # From up to four replicas to 64, where the network grows by the logarithm.
    few = [(1, 1), (1, 2), (1, 4), (2, 2), (2, 3), (2, 4), (3, 3), (3, 4), (4, 4)]
    truth = PLAIN._replace(growth_n=0.0)
    steps = measure_steps(truth, few, [8, 16, 32, 64], noise=0.05, seed=seed)
    far = measure_steps(truth, [(4, 8), (4, 16), (8, 32), (16, 64)], [8, 16, 32, 64])
    ours = errors(fit_perf_params(*steps[:5]), far)[1]
    theirs = errors(fit_like_adaptdl(*steps[:5]), far)[1]
    assert ours.max() < 0.15
    assert theirs.max() > 1.0
    assert ours.mean() < 0.2 * theirs.mean()


@pytest.mark.parametrize(("overlap", "noise"), turns([0.0, 0.8], [0.0, 0.02]))
def test_overhead_is_told_from_the_fixed_cost_of_micro_batches(
    overlap: float, noise: float
) -> None:
    truth = TRUTH._replace(overhead=0.1, overlap=overlap)
    steps, exact = (
        measure_steps(truth, ALLOCATIONS, [2, 8, 32], [1, 2, 4, 8], noise=x) for x in (noise, 0)
    )
    found = fit_stages(steps, truth, **stages_of(truth, steps, noise, seed=1)).perf_params
    assert found.overhead == pytest.approx(0.1, abs=1e-3 + 0.5 * noise)
    assert found.overlap == pytest.approx(overlap, abs=0.01 + 3 * noise)
    # Growth across nodes is pulled towards the logarithm.
    assert errors(found, exact).max() < 0.01 + 3 * noise
    # With one micro-batch it is part of what a micro-batch costs.
    one = measure_steps(truth, ALLOCATIONS, [2, 8, 32], [1])
    alone = fit_perf_params(*one[:5])
    assert alone.overhead == pytest.approx(0.0, abs=1e-7)
    assert alone.alpha_c == pytest.approx(truth.alpha_c + 0.1, rel=1e-3)


def test_stage_times_without_one_kind_are_refused() -> None:
    steps = measure_steps(TRUTH, [(1, 1)], [8, 16])
    forward = np.full((2, 3), 0.1)
    with pytest.raises(ValueError, match="backward is missing; give both or none"):
        fit_measurements(*steps[:5], forward=forward, num_stages=3)
    with pytest.raises(ValueError, match=r"forward has shape \(2, 3\); give \(points, 2\)"):
        fit_measurements(*steps[:5], forward=forward, backward=forward, num_stages=2)
    with pytest.raises(ValueError, match=r"backward has -0\.1; give a finite time >= 0 s"):
        fit_measurements(*steps[:5], forward=forward, backward=-forward, num_stages=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"atomic_bsz": []}, "atomic_bsz is empty"),
        ({"num_nodes": [1, 1]}, r"num_nodes has shape \(2,\), atomic_bsz \(3,\)"),
        ({"num_replicas": [1, 0, 2]}, "num_replicas has 0; give a number from 1 on"),
        ({"num_nodes": [1, 2, 1], "num_replicas": [1, 1, 2]}, "num_nodes is above num_replicas"),
        ({"accum_step_time": [0.1, 0.0, 0.1]}, "accum_step_time has 0; give a finite time"),
        ({"optim_step_time": [0.1, np.nan, 0.1]}, "optim_step_time has nan"),
        ({"optim_step_time": [0.1, np.inf, 0.1]}, "optim_step_time has inf"),
        ({"forward_shares": (0.4,)}, "backward_shares is missing"),
        ({"forward_shares": (0.4, 0.2), "backward_shares": (0.4,)}, "one of each per stage"),
        ({"forward_shares": (0.4,), "backward_shares": (0.4,)}, "sum to 0.8"),
        (
            {
                "forward_shares": (0.2, 0.2),
                "backward_shares": (0.3, 0.3),
                "compute_time": [0.1, -1.0, np.nan],
            },
            "compute_time has -1",
        ),
    ],
)
def test_bad_measurements_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    data: dict[str, Any] = {
        "num_nodes": [1, 1, 1],
        "num_replicas": [1, 2, 2],
        "atomic_bsz": [8, 8, 16],
        "accum_step_time": [0.1, 0.1, 0.15],
        "optim_step_time": [0.1, 0.12, 0.17],
    }
    with pytest.raises(ValueError, match=message):
        fit_perf_params(**(data | change))
