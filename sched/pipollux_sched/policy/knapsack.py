"""The multiple-choice knapsack: one option per job, none together more than there is.

    best_j[g] = max over options c of job j with cost_c ≤ g of best_{j−1}[g − cost_c] + value_c

is the greatest sum of values that the first j jobs reach with g units (Kellerer, Pferschy &
Pisinger, *Knapsack Problems*, 2004, section 11.5). Exact for integer costs, in time
O(units · Σ_j options_j), one numpy operation per option.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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
    best: Floats = np.zeros(capacity + 1)
    picks = []
    for cost, value in zip(costs, values, strict=True):
        best, pick = _add_job(best, cost, value)
        picks.append(pick)
    chosen = []
    left = int(best.argmax())
    total = float(best[left])
    for cost, pick in zip(reversed(costs), reversed(picks), strict=True):
        option = int(pick[left])
        chosen.append(option)
        left -= int(cost[option])
    return chosen[::-1], total


def _add_job(best: Floats, cost: Ints, value: Floats) -> tuple[Floats, NDArray[np.int16]]:
    after: Floats = np.full_like(best, -np.inf)
    pick = np.zeros(len(best), dtype=np.int16)
    for option in np.argsort(cost, kind="stable"):
        units = int(cost[option])
        if units >= len(best):
            break
        reached = best[: len(best) - units] + value[option]
        better = reached > after[units:]
        after[units:][better] = reached[better]
        pick[units:][better] = option
    return after, pick
