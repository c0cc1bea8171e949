"""The multiple-choice knapsack: one option per job, none together more than there is.

    best_j[g] = max over options c of job j with cost_c ≤ g of best_{j−1}[g − cost_c] + value_c

is the greatest sum of values that the first j jobs reach with g units (Kellerer, Pferschy &
Pisinger, *Knapsack Problems*, 2004, section 11.5). Exact for integer costs, in time
O(units · Σ_j options_j), over the few options that can be part of an optimum (`reduction`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .reduction import promising

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def knapsack(
    costs: Sequence[Ints], values: Sequence[Floats], capacity: int
) -> tuple[list[int], float]:
    """Choose one option for every job.

    Args:
        costs: per job, what each option takes; some option must take nothing.
        values: per job, what each option is worth; of equal ones that which takes least is chosen.
        capacity: units that there are.

    Returns:
        The index of the option of every job, and the sum of their values.

    Example:
        >>> knapsack([np.array([0, 1]), np.array([0, 2])], [np.array([0.0, 3.0]),
        ...     np.array([0.0, 5.0])], 2)
        ([0, 1], 5.0)
    """
    kept = [
        # Of equal ones the first is chosen: that which takes least.
        keep[np.argsort(cost[keep], kind="stable")]
        for keep, cost in zip(promising(costs, values, capacity), costs, strict=True)
    ]
    reached: list[Floats] = [np.zeros(capacity + 1)]
    for keep, cost, value in zip(kept, costs, values, strict=True):
        reached.append(_add_job(reached[-1], cost[keep], value[keep]))
    left = int(reached[-1].argmax())
    total = float(reached[-1][left])
    chosen = []
    for job in reversed(range(len(costs))):
        cost, value = costs[job][kept[job]], values[job][kept[job]]
        before = np.where(cost <= left, reached[job][np.maximum(left - cost, 0)], -np.inf)
        # The very sums of which the greatest was kept.
        pick = int((before + value == reached[job + 1][left]).argmax())
        chosen.append(int(kept[job][pick]))
        left -= int(cost[pick])
    return chosen[::-1], total


def _add_job(best: Floats, cost: Ints, value: Floats) -> Floats:
    after: Floats = np.full_like(best, -np.inf)
    for units, worth in zip(cost.tolist(), value.tolist(), strict=True):
        if units < len(best):
            to = after[units:]
            np.maximum(to, best[: len(best) - units] + worth, out=to)
    return after
