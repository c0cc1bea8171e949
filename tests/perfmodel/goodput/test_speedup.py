"""Speedup: relative to one replica, remembered, and the configuration behind it."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_perfmodel import (
    Configuration,
    GoodputFunction,
    GradParams,
    PerfParams,
    SpeedupFunction,
)
from pipollux_perfmodel.partitioning.layer_profile import Layer, LayerProfile
from pipollux_perfmodel.partitioning.stage_plan import plan_stages
from tests.extent import examples
from tests.perfmodel.strategies import allocations, grad_params, perf_params, pipelines

SEVEN = PerfParams(0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5)


class Counted(GoodputFunction):
    """Counts the allocations it is asked to optimise."""

    asked = 0

    def optimize(self, num_nodes: Any, num_replicas: Any, *args: Any, **kwargs: Any) -> Any:
        self.asked += np.broadcast(num_nodes, num_replicas).size
        return super().optimize(num_nodes, num_replicas, *args, **kwargs)


@examples(50, 200)
@given(perf_params(), grad_params(), allocations(40))
def test_is_the_ratio_of_best_goodputs(
    params: PerfParams, gradient: GradParams, allocation: tuple[int, int]
) -> None:
    goodput_fn = GoodputFunction(params, gradient, 32)
    limits: dict[str, Any] = {
        "max_batch_size": 1024,
        "atomic_bsz_range": (8, 128),
        "accumulation": True,
        "num_microbatches": 4,
    }
    speedup_fn = SpeedupFunction(goodput_fn, **limits)
    best, atomic_bsz, accum_steps = goodput_fn.optimize(*allocation, **limits)
    base = goodput_fn.optimize(1, 1, **limits)[0]
    assert speedup_fn(*allocation) == pytest.approx(best / base)
    found = speedup_fn.configuration(*allocation)
    assert found[:5] == (params.num_stages, allocation[1], 4, atomic_bsz, accum_steps)
    assert found.goodput == pytest.approx(best)
    assert found.speedup == pytest.approx(best / base)
    assert found.batch_size == allocation[1] * atomic_bsz * (accum_steps + 1)
    assert found.micro_bsz == atomic_bsz / 4


def test_arrays_and_scalars_agree_and_nothing_is_worth_nothing() -> None:
    speedup_fn = SpeedupFunction(GoodputFunction(SEVEN, (1.0, 8.0), 32), 1024, (8, 64), True)
    nodes, replicas = np.array([[0, 1, 1], [2, 3, 1]]), np.array([[0, 1, 8], [8, 3, 100]])
    found = speedup_fn(nodes, replicas)
    assert found.shape == (2, 3)
    assert found[0, 0] == 0.0
    assert found[0, 1] == 1.0
    for index in np.ndindex(2, 3):
        one = speedup_fn(int(nodes[index]), int(replicas[index]))
        assert isinstance(one, float)
        assert one == found[index]


def test_answers_are_kept_also_beyond_mem_size() -> None:
    goodput_fn = Counted(SEVEN, (1.0, 8.0), 32)
    speedup_fn = SpeedupFunction(goodput_fn, 4096, (8, 64), True, mem_size=4)
    assert speedup_fn.base_goodput > 0  # found when it is first asked for
    nodes, replicas = np.meshgrid(np.arange(2, 20), np.arange(20, 60))
    goodput_fn.asked = 0
    first = speedup_fn(nodes, replicas)
    assert goodput_fn.asked == 40  # one for each number of replicas: all lie on several nodes
    np.testing.assert_array_equal(speedup_fn(nodes, replicas), first)
    assert speedup_fn(5, 59) == first[-1, 0]
    assert goodput_fn.asked == 40


def test_too_many_replicas_for_the_largest_batch_are_worth_nothing() -> None:
    speedup_fn = SpeedupFunction(GoodputFunction(SEVEN, (1.0, 8.0), 32), 256, (16, 64), True)
    assert speedup_fn(2, 16) > 0
    assert speedup_fn(2, 17) == 0.0
    assert speedup_fn.configuration(2, 17)[3:] == (0, 0, 0.0, 0.0)


def test_a_job_too_large_for_one_replica_is_measured_by_its_fewest() -> None:
    # 128 samples at least, 32 a replica at most, no accumulation: 4 replicas are the least.
    goodput_fn = GoodputFunction(SEVEN, (1.0, 8.0), 128)
    speedup_fn = SpeedupFunction(goodput_fn, 512, (1, 32), accumulation=False)
    found = speedup_fn(1, np.arange(1, 7))
    assert found[:3].tolist() == [0.0, 0.0, 0.0]
    assert found[3] == pytest.approx(4.0)
    assert np.all(found[3:] > 0)


def test_a_job_that_fits_nothing_has_no_speedup() -> None:
    goodput_fn = GoodputFunction(SEVEN, (1.0, 8.0), 10)
    speedup_fn = SpeedupFunction(goodput_fn, 13, (7, 7), accumulation=True)
    assert speedup_fn(1, np.arange(1, 50)).tolist() == [0.0] * 49


@pytest.mark.parametrize("allocation", [(0, 1), (1, 0), (2, 1), (-1, -1)])
def test_impossible_allocations_are_refused(allocation: tuple[int, int]) -> None:
    speedup_fn = SpeedupFunction(GoodputFunction(SEVEN, (1.0, 8.0), 32))
    with pytest.raises(ValueError, match="or 0 and 0"):
        speedup_fn(*allocation)


def test_travels_to_another_process() -> None:
    speedup_fn = SpeedupFunction(GoodputFunction(SEVEN, (1.0, 8.0), 32), 512)
    copy = pickle.loads(pickle.dumps(speedup_fn))  # noqa: S301  # bytes of our own
    assert copy(1, 4) == speedup_fn(1, 4)


NODES, REPLICAS = np.tril_indices(12)  # every allocation of up to 12 replicas
NODES, REPLICAS = REPLICAS + 1, NODES + 1


@examples(20, 80)
@given(pipelines(), grad_params(), st.integers(1, 64), st.sampled_from([1, 2, 8]))
def test_monotone_never_falls_and_says_how_many_are_worth_having(
    params: PerfParams, gradient: GradParams, init_batch_size: int, factor: int
) -> None:
    goodput_fn = GoodputFunction(params, gradient, init_batch_size)
    limits: dict[str, Any] = {
        "max_batch_size": factor * init_batch_size,
        "atomic_bsz_range": (2, 16),
        "accumulation": True,
        "num_microbatches": (2, 4),
    }
    plain = SpeedupFunction(goodput_fn, **limits)
    monotone = SpeedupFunction(goodput_fn, **limits, monotone=True)
    table = np.zeros((13, 13))
    table[NODES, REPLICAS] = monotone(NODES, REPLICAS)
    assert np.all(table[NODES, REPLICAS] >= plain(NODES, REPLICAS))
    for nodes in range(1, 13):
        assert np.all(np.diff(table[nodes, nodes:]) >= 0)
    for nodes, replicas in [(1, 1), (1, 12), (2, 12), (3, 7), (5, 6), (12, 12)]:
        found = monotone.configuration(nodes, replicas)
        check(found, goodput_fn, nodes, replicas)
        assert found.speedup == table[nodes, replicas]
        # The fewest: with one fewer the speedup is less.
        fewer = np.arange(1, found.num_replicas)
        some_nodes = np.minimum(nodes, fewer)
        assert np.all((plain(some_nodes, fewer) < found.speedup)[fewer >= nodes])


def check(
    found: Configuration, goodput_fn: GoodputFunction, num_nodes: int, num_replicas: int
) -> None:
    """What a configuration says of itself agrees."""
    assert 1 <= found.num_replicas <= num_replicas
    if found.goodput == 0:
        assert (found.atomic_bsz, found.speedup) == (0, 0.0)
        return
    on = min(num_nodes, found.num_replicas)
    sizes = found.num_replicas, found.atomic_bsz, found.accum_steps, found.num_microbatches
    assert found.goodput == pytest.approx(goodput_fn.evaluate(on, *sizes))
    assert found.batch_size == found.num_replicas * found.atomic_bsz * (found.accum_steps + 1)
    assert found.speedup > 0


@examples(16, 80)
@given(pipelines(), grad_params(), st.integers(1, 64))
def test_goodput_and_speedup_of_a_configuration_agree(
    params: PerfParams, gradient: GradParams, init_batch_size: int
) -> None:
    goodput_fn = GoodputFunction(params, gradient, init_batch_size)
    limits: dict[str, Any] = {"max_batch_size": 4 * init_batch_size, "num_microbatches": (1, 4)}
    for monotone in (False, True):
        speedup_fn = SpeedupFunction(goodput_fn, **limits, monotone=monotone)
        base = speedup_fn.configuration(1, 1)
        assert base.speedup == 1.0
        for nodes, replicas in [(1, 2), (1, 8), (2, 3), (3, 8), (7, 8)]:
            found = speedup_fn.configuration(nodes, replicas)
            check(found, goodput_fn, nodes, replicas)
            assert found.goodput == pytest.approx(found.speedup * base.goodput)


def test_idle_replicas_may_leave_nodes() -> None:
    # A slow network: of six replicas on five nodes, two on two nodes are worth most.
    params = PerfParams(0.1, 0.01, 0.01, 1.0, 0.01, 0.01, 1.5)
    speedup_fn = SpeedupFunction(GoodputFunction(params, (0.1, 80.0), 32), 256, monotone=True)
    found = speedup_fn.configuration(5, 6)
    assert found.num_replicas == 2
    assert found.speedup == speedup_fn(5, 6) == speedup_fn(2, 2)
    assert found.goodput == pytest.approx(found.speedup * speedup_fn.configuration(1, 1).goodput)


@pytest.mark.parametrize(
    ("extra", "told_apart"),
    [({}, 1 + 1), ({"two_node_penalty": 0.5}, 1 + 2), ({"contention": 0.1}, 8)],
)
def test_asks_once_for_what_the_model_tells_apart(extra: dict[str, float], told_apart: int) -> None:
    goodput_fn = Counted(SEVEN._replace(**extra), (1.0, 8.0), 32)
    speedup_fn = SpeedupFunction(goodput_fn, 4096, (8, 64), True)
    assert speedup_fn.base_goodput > 0  # found when it is first asked for
    nodes = np.arange(1, 9)
    goodput_fn.asked = 0
    first = speedup_fn(nodes, 16)
    assert goodput_fn.asked == told_apart == len(set(first.tolist()))
    again = [speedup_fn(int(n), 16) for n in nodes]
    assert again == first.tolist()
    assert goodput_fn.asked == told_apart


def test_chooses_among_plans_within_memory() -> None:
    layer = Layer(1e-3, 1e-3, 1e-3, 2e-3, 1000.0, 2000.0, 10.0, 1.0)
    profile = LayerProfile((layer,) * 4)
    plans = [plan_stages(profile, k, 8, SEVEN, micro_bsz=4) for k in (1, 2)]
    goodput_fn = GoodputFunction(plans[0].perf_params, (1.0, 8.0), 64)
    limits: dict[str, Any] = {
        "max_batch_size": 512,
        "plans": plans,
        "memory_limit": 9000.0,
        "num_microbatches": (2, 4),
    }
    speedup_fn = SpeedupFunction(goodput_fn, **limits)
    found = speedup_fn.configuration(2, 8)
    assert found.num_stages == 2
    held = plans[1].memory(np.ceil(found.micro_bsz), found.num_microbatches)
    assert np.all(held <= 9000)
    function = goodput_fn.with_params(plans[1].perf_params)
    check(found, function, 2, 8)
    assert SpeedupFunction(goodput_fn, **{**limits, "memory_limit": 3000.0})(2, 8) == 0.0


@examples(30)
@given(pipelines(), grad_params(), st.booleans(), st.integers(1, 40))
def test_arrays_give_what_scalars_give(
    params: PerfParams, gradient: GradParams, monotone: bool, mem_size: int
) -> None:
    goodput_fn = GoodputFunction(params, gradient, 8)
    together, alone = (
        SpeedupFunction(goodput_fn, 64, accumulation=True, monotone=monotone, mem_size=mem_size)
        for _ in range(2)
    )
    found = together(NODES, REPLICAS)
    # In another order, one by one.
    for index in reversed(range(0, len(NODES), 7)):
        one = alone(int(NODES[index]), int(REPLICAS[index]))
        assert one == pytest.approx(found[index], rel=1e-12)
    assert together(np.zeros((2, 0), int), np.zeros((2, 0), int)).shape == (2, 0)


def test_two_ways_to_run_a_job_are_measured_by_one_base() -> None:
    fast = GoodputFunction(SEVEN, GradParams(1.0, 8.0), 32)
    slow = fast.with_params(SEVEN._replace(beta_c=0.02))
    base = fast.optimize(1, 1, 256)[0]
    of_slow = SpeedupFunction(slow, 256, base_goodput=base)
    assert SpeedupFunction(fast, 256, base_goodput=base)(1, 1) == 1.0
    assert of_slow(1, 1) == slow.optimize(1, 1, 256)[0] / base < 1.0
    assert of_slow(1, 2) == slow.optimize(1, 2, 256)[0] / base
    assert of_slow(0, 0) == 0.0


@pytest.mark.parametrize("base", [0.0, -1.0, float("nan"), float("inf")])
def test_a_base_that_is_no_goodput_is_refused(base: float) -> None:
    goodput_fn = GoodputFunction(SEVEN, GradParams(1.0, 8.0), 32)
    with pytest.raises(ValueError, match=r"base_goodput is .*; give finite"):
        SpeedupFunction(goodput_fn, base_goodput=base)
