"""The multiple-choice knapsack: one item per job, within a total capacity.

    best_j[g] = max over items c of job j with cost_jc ≤ g of best_{j−1}[g − cost_jc] + value_jc

is the greatest sum of values that the first j jobs reach with g units (Kellerer, Pferschy &
Pisinger, *Knapsack Problems*, 2004, section 11.5). It is exact for integer costs, in time O(units ·
Σ_j items_j). Items that are in no optimum are dropped first (chapter 11). With a price λ ≥ 0,

    score_jc = value_jc − λ · cost_jc          top_j = max over c of score_jc
    D        = λ · capacity + Σ_j top_j        upper bound on every choice within the capacity
    L        = the value of some choice within the capacity

a choice that contains item c of job j has at most the value D − (top_j − score_jc). So items with
top_j − score_jc > D − L can be dropped, and every optimal choice remains: at the price where D is
least, a handful of dozens of items. The cheapest items of all jobs are always paid for, so g counts
only the units beyond them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipollux_policies.placement.node_choice import Floats, Ints

_TOLERANCE = 1e-9
"""The largest rounding error of a bound, relative to the sum of all values."""
_STEPS = 40
"""Most steps to the best price; any price is valid, a good one drops more items."""
_EXCHANGES = 8


def knapsack(
    costs: Sequence[Ints], values: Sequence[Floats], capacity: int
) -> tuple[list[int], float]:
    """Return the index of the chosen item of every job, and the sum of their values.

    `costs` are units of items, some of each job 0; of equal values the cheapest is chosen.

    >>> knapsack([np.array([0, 1]), np.array([0, 2])], [np.array([0.0, 3.0]),
    ...     np.array([0.0, 5.0])], 2)
    ([0, 1], 5.0)
    """
    if not costs:
        return [], 0.0
    kept = promising(costs, values, capacity)
    counts = np.array([len(keep) for keep in kept])
    first, owner = np.cumsum(counts) - counts, np.repeat(np.arange(len(kept)), counts)
    before = np.cumsum([0, *(len(cost) for cost in costs[:-1])])
    items = np.concatenate(kept)
    cost, value = (np.concatenate(part)[before[owner] + items] for part in (costs, values))
    # Among equal values the first, the cheapest, is chosen.
    order = np.lexsort((cost, owner))
    items, cost, value = items[order], cost[order], value[order]
    # Every job needs at least its cheapest item: count only the units beyond it.
    beyond = cost - cost[first][owner]
    last = first + counts - 1
    units = min(capacity - int(cost[first].sum()), int(beyond[last].sum()))
    # A job with one remaining item has no choice.
    total = sum(value[first[counts == 1]].tolist())
    chosen: list[int] = items[first].tolist()
    left_open = np.flatnonzero(counts > 1)
    of_open = list(
        zip(left_open.tolist(), first[left_open].tolist(), last[left_open].tolist(), strict=True)
    )
    more, worth = beyond.tolist(), value.tolist()
    reached: list[Floats] = [np.zeros(units + 1)]
    for _, begin, end in of_open:
        reached.append(_add_job(reached[-1], more[begin : end + 1], worth[begin : end + 1]))
    left = int(reached[-1].argmax())
    total = float(reached[-1][left]) + total
    for number, (job, begin, end) in reversed(list(enumerate(of_open))):
        best = reached[number + 1][left]
        for item in range(begin, end + 1):
            # Exact comparison: these are the sums whose maximum was stored.
            if more[item] <= left and reached[number][left - more[item]] + worth[item] == best:
                chosen[job] = int(items[item])
                left -= more[item]
                break
    return chosen, total


def _add_job(best: Floats, costs: Sequence[int], values: Sequence[float]) -> Floats:
    after: Floats = best + values[0]  # the cheapest item needs no units
    for units, worth in zip(costs[1:], values[1:], strict=True):
        if units < len(best):
            to = after[units:]
            np.maximum(to, best[: len(best) - units] + worth, out=to)
    return after


def promising(costs: Sequence[Ints], values: Sequence[Floats], capacity: int) -> list[Ints]:
    """Return, per job, the ascending indices of items that contain every optimal choice.

    >>> promising([np.array([0, 1]), np.array([0, 1])],
    ...     [np.array([0.0, 9.0]), np.array([0.0, 2.0])], 1)
    [array([1]), array([0, 1])]
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
    rows, items = np.nonzero(scores >= top[:, None] - spare)
    return np.split(items, np.searchsorted(rows, np.arange(1, len(costs))))


class _Choice(NamedTuple):
    picks: Ints
    units: int
    value: float


class _Table:
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
        units = int(self.costs[self.rows, picks].sum())
        return _Choice(picks, units, float(self.values[self.rows, picks].sum()))

    def best_at(self, price: float) -> _Choice:
        return self.choice((self.values - price * self.costs).argmax(axis=1))

    def cheapest(self) -> _Choice:
        return self.choice(np.where(self.costs == 0, self.values, -np.inf).argmax(axis=1))


def _best_price(table: _Table) -> tuple[float, _Choice, _Choice]:
    """Return the price with the least D, and its best choices within and beyond the capacity.

    D is the maximum of one straight line per choice: the price where the lines of two choices meet
    is better than that of either, or the best.
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
    """Improve a choice within the capacity by exchanges towards `outside`."""
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
        job, item = divmod(int(gains.argmax()), gains.shape[1])
        if gains[job, item] <= 0:
            break
        picks = picks.copy()
        picks[job] = item
        best = table.choice(picks)
    return best
