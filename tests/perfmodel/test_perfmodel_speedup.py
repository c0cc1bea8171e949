"""Speedup: relative to one replica, remembered, and the configuration behind it."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from pipollux_perfmodel import GoodputFunction, GradParams, PerfParams, SpeedupFunction
from tests.perfmodel.strategies import allocations, grad_params, perf_params

SEVEN = PerfParams(0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5)


class Counted(GoodputFunction):
    """Counts the allocations it is asked to optimise."""

    asked = 0

    def optimize(self, num_nodes: Any, num_replicas: Any, *args: Any, **kwargs: Any) -> Any:
        self.asked += np.broadcast(num_nodes, num_replicas).size
        return super().optimize(num_nodes, num_replicas, *args, **kwargs)


@settings(derandomize=True, deadline=None, max_examples=100)
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
