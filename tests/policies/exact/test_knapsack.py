"""What is dropped before a knapsack is solved is in no optimum, found by trying all choices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pipollux_policies.exact.knapsack import knapsack, promising
from tests.extent import first


def random_knapsack(
    seed: int,
) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """Draw items of a few jobs, of which one takes nothing: smooth, rough, or with ties."""
    rng = np.random.default_rng(seed)
    costs, values = [], []
    for _ in range(rng.integers(1, 6)):
        cost = np.concatenate([[0], rng.integers(0, 8, rng.integers(0, 6))])
        value = [
            np.sqrt(cost) * rng.uniform(0.5, 2),
            rng.normal(size=len(cost)),
            rng.integers(-3, 6, len(cost)).astype(float),
            -1 / np.maximum(cost * rng.uniform(0.1, 1), 0.01),
        ][seed % 4]
        if rng.random() < 0.1:
            value[0] = -1e4  # a job that must not go without
        costs.append(cost)
        values.append(value)
    return costs, values, int(rng.integers(0, 20))


def optima(
    costs: list[np.ndarray], values: list[np.ndarray], capacity: int
) -> tuple[float, list[tuple[int, ...]]]:
    """Return the greatest value, and every choice that reaches it."""
    found = []
    for choice in itertools.product(*(range(len(cost)) for cost in costs)):
        if sum(int(cost[c]) for cost, c in zip(costs, choice, strict=True)) <= capacity:
            worth = sum(float(value[c]) for value, c in zip(values, choice, strict=True))
            found.append((worth, choice))
    best = max(worth for worth, _ in found)
    return best, [choice for worth, choice in found if worth >= best - 1e-12 * abs(best)]


@pytest.mark.parametrize("seed", first(40, range(200)))
def test_every_optimum_is_kept(seed: int) -> None:
    costs, values, capacity = random_knapsack(seed)
    kept = promising(costs, values, capacity)
    best, choices = optima(costs, values, capacity)
    for choice in choices:
        assert all(item in keep for item, keep in zip(choice, kept, strict=True))
    chosen, value = knapsack(costs, values, capacity)
    assert value == pytest.approx(best)
    assert tuple(chosen) in choices


def test_smooth_items_are_mostly_dropped() -> None:
    rng = np.random.default_rng(0)
    costs = [np.arange(65)] * 40
    values = [-1 / np.maximum(costs[0] ** rng.uniform(0.5, 1), 0.01) for _ in costs]
    kept = promising(costs, values, 64)
    assert sum(map(len, kept)) < 0.2 * 40 * 65


def test_with_room_for_all_only_the_best_items_stay() -> None:
    costs, values = [np.array([0, 1, 2])] * 2, [np.array([0.0, 1.0, 3.0])] * 2
    assert [keep.tolist() for keep in promising(costs, values, 4)] == [[2], [2]]


def test_no_jobs() -> None:
    assert promising([], [], 4) == []
