"""The cut of layers into stages, against all cuts there are."""

from __future__ import annotations

import time
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipollux_perfmodel import partition


def slowest(costs: list[float], balance: list[int]) -> float:
    ends = np.cumsum([0, *balance])
    return max(sum(costs[start:end]) for start, end in pairwise(ends))


def all_balances(num_layers: int, num_stages: int) -> list[list[int]]:
    cuts = combinations(range(1, num_layers), num_stages - 1)
    return [list(np.diff([0, *cut, num_layers])) for cut in cuts]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.data())
def test_no_other_cut_has_a_faster_slowest_stage(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.floats(0, 100), min_size=1, max_size=9))
    num_stages = data.draw(st.integers(1, len(costs)))
    found = partition(costs, num_stages)
    assert len(found) == num_stages
    assert sum(found) == len(costs)
    assert min(found) >= 1
    best = min(slowest(costs, balance) for balance in all_balances(len(costs), num_stages))
    assert slowest(costs, found) == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_known_cuts() -> None:
    assert partition([1, 1, 1, 3], 2) == [3, 1]
    assert partition([5], 1) == [1]
    assert partition([1, 1, 1], 3) == [1, 1, 1]
    assert sorted(partition([0, 0, 0, 0], 3)) == [1, 1, 2]


def test_hundreds_of_layers_take_no_time() -> None:
    costs = np.random.default_rng(0).gamma(2.0, size=400).tolist()
    begin = time.thread_time()
    found = partition(costs, 16)
    assert time.thread_time() - begin < 2.0
    assert slowest(costs, found) >= sum(costs) / 16


@pytest.mark.parametrize(
    ("costs", "num_stages", "message"),
    [
        ([1.0, 2.0], 0, "num_stages is 0"),
        ([1.0, 2.0], 3, "num_stages is 3 but there are 2 layers"),
        ([1.0, -2.0], 1, r"costs\[1\] is -2"),
        ([float("nan")], 1, r"costs\[0\] is nan"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    costs: list[float], num_stages: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        partition(costs, num_stages)
