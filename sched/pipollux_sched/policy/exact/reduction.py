"""Options of a knapsack that no optimum takes, found before it is solved.

Symbols: option c of job j takes cost_jc units and is worth v_jc; a price λ ≥ 0 for every unit.

    score_jc = v_jc − λ · cost_jc              top_j = max over c of score_jc
    D        = λ · capacity + Σ_j top_j        no choice within the capacity is worth more
    L        = the value of some choice that keeps to the capacity

A choice that takes option c of job j is worth D − (top_j − score_jc) at most. So where top_j −
score_jc exceeds D − L the option can go: the optimum, and every choice as good, is left as it was
(Kellerer, Pferschy & Pisinger, *Knapsack Problems*, 2004, chapter 11). The price is where D is
least, and there D − L is mostly less than what one job gains by a few units; of dozens of options a
handful stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_TOLERANCE = 1e-9
"""Of all values together: what rounding may take from a bound."""
_STEPS = 40
"""Steps to the best price at most; any price is right, a good one drops more."""
_EXCHANGES = 8
"""Single exchanges by which L is raised at most."""


class _Choice(NamedTuple):
    """One option of every job."""

    picks: Ints
    """(J,)"""
    units: int
    value: float


class _Table:
    """The options of all jobs, in two arrays: (J, C)."""

    def __init__(self, costs: Sequence[Ints], values: Sequence[Floats], capacity: int) -> None:
        self.capacity = capacity
        counts = np.array([len(cost) for cost in costs])
        there = np.arange(counts.max()) < counts[:, None]
        self.costs: Ints = np.zeros(there.shape, dtype=np.int64)
        self.costs[there] = np.concatenate(costs)
        self.values: Floats = np.full(there.shape, -np.inf)
        self.values[there] = np.concatenate(values)
        self.values[self.costs > capacity] = -np.inf
        self.rows: Ints = np.arange(len(counts))

    def choice(self, picks: Ints) -> _Choice:
        """Add up what a choice takes and is worth."""
        units = int(self.costs[self.rows, picks].sum())
        return _Choice(picks, units, float(self.values[self.rows, picks].sum()))

    def best_at(self, price: float) -> _Choice:
        """Return the choice with the best scores."""
        return self.choice((self.values - price * self.costs).argmax(axis=1))

    def cheapest(self) -> _Choice:
        """Return the best choice that takes nothing."""
        return self.choice(np.where(self.costs == 0, self.values, -np.inf).argmax(axis=1))


def promising(costs: Sequence[Ints], values: Sequence[Floats], capacity: int) -> list[Ints]:
    """Return the options of every job that an optimal choice may take.

    Args:
        costs: per job, what each option takes; some option must take nothing.
        values: per job, what each option is worth.
        capacity: units that there are.

    Returns:
        Per job, indices of options in ascending order. Every optimal choice is among them.

    Example:
        >>> promising([np.array([0, 1]), np.array([0, 1])],
        ...     [np.array([0.0, 9.0]), np.array([0.0, 2.0])], 1)
        [array([1]), array([0])]
    """
    if not costs:
        return []
    table = _Table(costs, values, capacity)
    price, inside, outside = _best_price(table)
    low = _filled(table, inside, outside)
    scores = table.values - price * table.costs
    top = scores.max(axis=1)
    bound = price * capacity + float(top.sum())
    finite = np.where(np.isfinite(table.values), np.abs(table.values), 0.0)
    spare = max(bound - low.value, 0.0) + _TOLERANCE * float(finite.max(axis=1).sum())
    kept = scores >= top[:, None] - spare
    return [np.flatnonzero(row) for row in kept]


def _best_price(table: _Table) -> tuple[float, _Choice, _Choice]:
    """Return the price where D is least, and best choices there within and beyond the capacity.

    D is the greatest of straight lines, one for every choice: where the lines of two choices meet
    is a better price than either's, or the best.
    """
    outside = table.best_at(0.0)
    if outside.units <= table.capacity:
        return 0.0, outside, outside
    inside = table.cheapest()
    price = 0.0
    for _ in range(_STEPS):
        price = max((outside.value - inside.value) / (outside.units - inside.units), 0.0)
        found = table.best_at(price)
        gained = (found.value - inside.value) - price * (found.units - inside.units)
        if gained <= _TOLERANCE * abs(inside.value):
            break
        if found.units <= table.capacity:
            inside = found
        else:
            outside = found
    return price, inside, outside


def _filled(table: _Table, inside: _Choice, outside: _Choice) -> _Choice:
    """Give what a choice within the capacity leaves to some jobs, as the choice beyond it does."""
    more = table.costs[table.rows, outside.picks] - table.costs[table.rows, inside.picks]
    left = table.capacity - inside.units
    fits = (np.cumsum(more) <= left) & (np.cumsum(np.maximum(more, 0)) <= left)
    best = table.choice(np.where(fits, outside.picks, inside.picks))
    if best.value < inside.value:
        best = inside
    for _ in range(_EXCHANGES):
        picks = best.picks
        room = table.capacity - best.units + table.costs[table.rows, picks]
        gains = table.values - table.values[table.rows, picks][:, None]
        gains[table.costs > room[:, None]] = 0.0
        job, option = divmod(int(gains.argmax()), gains.shape[1])
        if gains[job, option] <= 0:
            break
        picks = picks.copy()
        picks[job] = option
        best = table.choice(picks)
    return best


__all__ = ["promising"]
