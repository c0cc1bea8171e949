"""Speedups by number of stages: one base, measured where it runs, priced from layers elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from pipollux_perfmodel import (
    GoodputFunction,
    GradParams,
    Layer,
    LayerProfile,
    PerfParams,
    SchedHints,
    price_stages,
    stage_memory,
    stage_speedups,
)
from pipollux_perfmodel.timing.params import CUT_SCHEDULES

LAYERS = LayerProfile.from_layers(
    [Layer(1e-4, 1e-3, 1e-4, 2e-3, parameter_bytes=1e6, activation_bytes=1e4) for _ in range(8)]
)
NETWORK = PerfParams(0.0, 1.0, 0.02, 0.002, 0.01, 0.001, 1.5)


def hints(num_stages: int = 1, slower: float = 1.0, **fields: Any) -> SchedHints:
    """A job that runs in equal stages, so much slower than its profile says."""
    balance = [8 // num_stages] * num_stages
    params = price_stages(LAYERS, balance, NETWORK, checkpoint="never")
    measured = params._replace(alpha_c=slower * params.alpha_c, beta_c=slower * params.beta_c)
    known: dict[str, Any] = {
        "init_batch_size": 64,
        "max_batch_size": 1024,
        "local_bsz_bounds": (16, 256),
        "gradient_accumulation": True,
        "grad_params": GradParams(1.0, 8.0),
        "perf_params": measured,
        "num_stages": num_stages,
        "num_microbatches": 1 if num_stages == 1 else 4 * num_stages,
        "layers": LAYERS,
    }
    return SchedHints(**{**known, **fields})


@pytest.mark.parametrize("ratios", [None, ((1, 1, 1.1), (1, 2, 1.5), (2, 4, 0.8))])
def test_what_runs_is_judged_by_its_measurements(
    ratios: tuple[tuple[int, int, float], ...] | None,
) -> None:
    """By the fit, and what that leaves over; other numbers of stages have nothing left over."""
    job = hints(slower=1.7, step_ratios=ratios)
    found, alone = stage_speedups(job, 1, [1, 2]), job.speedup_function()
    assert alone is not None
    for allocation in ((1, 1), (1, 2), (2, 4)):
        assert found[1](*allocation) == pytest.approx(alone(*allocation))
        ours, theirs = found[1].configuration(*allocation), alone.configuration(*allocation)
        assert ours == theirs
        plain = stage_speedups(hints(slower=1.7), 1, [1, 2])
        factor = 1.0 if ratios is None else {1: 1.1, 2: 1.5, 4: 0.8}[allocation[1]]
        kept = {k: fn.configuration(*allocation).goodput for k, fn in plain.items()}
        assert ours.goodput == pytest.approx(kept[1] / factor)
        assert found[2].configuration(*allocation).goodput == pytest.approx(kept[2])


@pytest.mark.parametrize("slower", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("runs_in", [1, 2, 4])
def test_others_are_as_slow_as_what_was_measured(runs_in: int, slower: float) -> None:
    """By hand: a pipeline of equal stages, each as much slower than the profile as what runs."""
    job = hints(runs_in, slower)
    found = stage_speedups(job, runs_in, [1, 2, 4])
    base = found[runs_in].base_goodput
    for num_stages in (1, 2, 4):
        best = found[num_stages].configuration(1, 1)
        assert best.num_stages == num_stages
        b, count = best.micro_bsz, best.num_microbatches
        layer = slower * (2e-4 + 3e-3 * b)
        seconds = (8 + (count - 1) * 8 / num_stages) * layer
        goodput_fn = GoodputFunction(NETWORK, GradParams(1.0, 8.0), 64)
        worth = best.batch_size * goodput_fn.efficiency(best.batch_size)
        expected = worth / (seconds * (best.accum_steps + 1)) / base
        assert best.speedup == pytest.approx(expected, rel=1e-6)


def test_a_list_of_checkpoint_modes_fixes_the_stages() -> None:
    """Its script refuses any other number, whatever the layers would allow."""
    job = hints(2)
    assert job.perf_params is not None
    params = job.perf_params._replace(checkpoint=("always", "never"))
    apart = job.model_copy(update={"perf_params": params})
    assert list(stage_speedups(job, 2, [1, 2, 4])) == [2, 1, 4]
    assert list(stage_speedups(apart, 2, [1, 2, 4])) == [2]


def test_all_have_one_base() -> None:
    """The speedup of another K is its goodput over that of one replica of the job's own K."""
    found = stage_speedups(hints(2), 4, [1, 2])
    assert list(found) == [4, 1, 2]
    assert found[4](1, 1) == pytest.approx(1.0)
    goodputs = {k: fn.configuration(1, 1).goodput for k, fn in found.items()}
    for num_stages, speedup_fn in found.items():
        assert speedup_fn(1, 1) == pytest.approx(goodputs[num_stages] / goodputs[4])


def test_what_cannot_be_cut_is_not_offered() -> None:
    assert list(stage_speedups(hints(), 1, [2, 8, 16])) == [1, 2, 8]
    # Parameters and gradients alone: 16 MB on one device, 8 MB on each of two.
    small = hints(2, memory_limit=1.2e7)
    assert list(stage_speedups(small, 2, [1, 4])) == [2, 4]
    # The job's own K is there all the same: its user has said that it fits.
    assert list(stage_speedups(small, 1, [2, 4])) == [1, 2, 4]


def test_whatever_batch_the_job_chooses_has_to_fit() -> None:
    """It chooses by its own model, and asks nobody for memory."""
    by_hand = {
        count: float(stage_memory(LAYERS, [2] * 4, 256 / count, count).max()) for count in (8, 16)
    }
    needed = max(by_hand.values())
    assert list(stage_speedups(hints(2, memory_limit=1.001 * needed), 2, [4])) == [2, 4]
    assert list(stage_speedups(hints(2, memory_limit=0.999 * needed), 2, [4])) == [2]
    modest = hints(2, memory_limit=0.999 * needed, local_bsz_bounds=(16, 128))
    assert list(stage_speedups(modest, 2, [4])) == [2, 4]


def test_1f1b_fits_where_gpipe_does_not() -> None:
    """What runs is 1F1B, so the others would be, with the activations of a few micro-batches."""
    small = {
        schedule: float(stage_memory(LAYERS, [2] * 4, 256 / 8, 8, schedule=schedule).max())
        for schedule in CUT_SCHEDULES
    }
    assert small["1f1b"] < small["gpipe"]
    limit = 0.99 * small["gpipe"]
    gpipe = hints(2, memory_limit=limit)
    assert gpipe.perf_params is not None
    params = gpipe.perf_params._replace(schedule="1f1b")
    other = hints(2, memory_limit=limit, perf_params=params)
    assert list(stage_speedups(gpipe, 2, [4])) == [2]
    assert list(stage_speedups(other, 2, [4])) == [2, 4]


def test_divided_optimizer_state_fits_from_enough_replicas_on() -> None:
    """Fewer replicas than the memory asks for are worth nothing, and more are worth as much."""
    heavy = [layer._replace(optimizer_bytes=4e6) for layer in LAYERS.layers]
    layers = LayerProfile.from_layers(heavy, LAYERS.input_bytes)
    needed = {
        replicas: max(
            float(stage_memory(layers.sharded(replicas), [2] * 4, 256 / count, count).max())
            for count in (8, 16)
        )
        for replicas in (1, 2, 4)
    }
    assert needed[1] > needed[2] > needed[4]
    limit = 1.001 * needed[4]
    undivided = hints(2, memory_limit=limit, layers=layers)
    assert list(stage_speedups(undivided, 2, [4])) == [2]
    divided = hints(2, memory_limit=limit, layers=layers, sharded_optimizer=True)
    assert SchedHints.from_json_object(divided.to_json_object()) == divided
    assert "shardedOptimizer" not in undivided.to_json_object()
    found = stage_speedups(divided, 2, [4])[4]
    roomy = stage_speedups(hints(2, layers=layers), 2, [4])[4]
    assert [found(1, replicas) for replicas in (1, 2, 3)] == [0.0] * 3
    for replicas in (4, 5, 8):
        assert found(1, replicas) == pytest.approx(roomy(1, replicas))
        assert found(1, replicas) > 0


def test_without_layers_only_its_own_and_what_runs() -> None:
    job = hints(2, layers=None)
    assert list(stage_speedups(job, 2, [1, 2, 4])) == [2]
    assert list(stage_speedups(job, 1, [1, 2, 4])) == [1, 2]
    assert stage_speedups(hints(perf_params=None), 1, [1, 2]) == {}


def test_bounds_that_nothing_satisfies() -> None:
    job = hints(local_bsz_bounds=(2048, 4096))
    found = stage_speedups(job, 1, [1, 2])
    assert list(found) == [1]
    assert found[1](1, 1) == 0.0


def test_the_cut_that_runs_may_be_told() -> None:
    """A lopsided cut: its slow stage has most of the layers, not slow ones."""
    balance = [6, 2]
    params = price_stages(LAYERS, balance, NETWORK, checkpoint="never")
    told = stage_speedups(hints(2, perf_params=params, balance=balance), 2, [1])[1]
    fair = stage_speedups(hints(1), 1)[1]
    assert told.configuration(1, 1).goodput == pytest.approx(
        fair.configuration(1, 1).goodput, rel=1e-2
    )


def test_stages_that_take_turns_gain_nothing() -> None:
    """What the job remembers of an earlier run in several stages, or has never seen."""
    optimistic = hints().perf_params
    assert optimistic is not None
    remembered = hints(perf_params=optimistic._replace(overlap=0.0))
    assert stage_speedups(hints(), 1, [4])[4](1, 1) > 2.0
    assert stage_speedups(remembered, 1, [4])[4](1, 1) == pytest.approx(1.0)
