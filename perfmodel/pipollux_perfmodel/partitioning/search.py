"""The search for the contiguous cut with the shortest GPipe iteration; called by `partition`.

Up to terms that are equal for all cuts, a cut into K stages takes (M micro-batches, f_k and g_k
forward and backward of stage k, t_k copy after it)

    2·Σt + (M - 1)·(max f + max g)          f, g include or join the copies t

The two maxima may lie in different stages, so one number per prefix of the layers is not enough. A
label is a prefix cut into stages, with (Σt, max f, max g). In each round, labels grow by one stage.
A label is dropped if another of the same prefix is no worse in every number (Pareto dominance), or
if even the best completion, known from dynamic programs over suffixes, is no better than the best
known cut. Neither drops the optimum.

Under `except_last` the backward is the longest path through a flow shop whose first job differs, a
label's fourth number (h_k is g_k without recomputation, q runs over stages and copies):

    D_k = h_k + max(D_{k-1}, Σ_{q≤k} g_q + (M - 2)·max_{q≤k} g_q)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .layer_profile import Floats

Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

# Cuts with smaller differences are equally good.
_TOLERANCE = 1e-12
# Weight of the balance with a single micro-batch, where balance gains nothing.
_TIE_BREAK = 1e-9
# Neighbours compared with a label; more comparisons drop more labels but take longer.
_NEIGHBOURS = 24


@dataclass(frozen=True)
class CutCosts:
    """Seconds of one micro-batch by layer (L,), with recomputation, and of copies at the cuts."""

    forward: Floats
    backward: Floats
    last_backward: Floats
    """Of the last micro-batch; equal to `backward` unless `one_shorter`."""
    transfer: Floats
    """Shape (L + 1,), 0 at both ends."""
    overlapping: bool
    num_microbatches: int
    one_shorter: bool
    """Whether only the last micro-batch is not recomputed."""


class _Labels(NamedTuple):
    end: Ints
    copies: Floats
    slowest_forward: Floats
    slowest_backward: Floats
    path: Floats
    """D if the last micro-batch is shorter, else 0."""


class _Table(NamedTuple):
    """A cost of a stage, and its minimum over all remaining stages."""

    stage: Floats
    """Of layers i to j - 1 as one stage, shape (L + 1, L + 1)."""
    rest: list[Floats]
    """[r][i]: of r more stages with the layers from i on; infinite if impossible."""
    joined: np.ufunc


_Step: TypeAlias = tuple[Ints, Ints]


def least_rest(costs: Sequence[Floats], joined: np.ufunc = np.maximum) -> list[Floats]:
    """Return the least cost of every suffix of the layers, by number of stages: K + 1 arrays.

    costs[r - 1][i, j] is that of layers i to j - 1 as the stage with r stages left, including
    itself; infinite if there is none. `joined`, `np.maximum` or `np.add`, combines costs of stages.
    """
    least = np.full(len(costs[0]), np.inf)
    least[-1] = 0.0
    rests = [least]
    for cost in costs:
        least = joined(cost, least).min(axis=1)
        rests.append(least)
    return rests


def find_cut(costs: CutCosts, allowed: Sequence[Bools]) -> list[int] | None:
    """Return the ends of the stages of the best cut, starting with 0; None if there is no cut.

    allowed[r - 1][i, j]: whether layers i to j - 1 may be the stage with r stages left, including
    itself; shape (L + 1, L + 1), False for j <= i.
    """
    return _Search(costs, allowed).run()


class _Search:
    def __init__(self, costs: CutCosts, allowed: Sequence[Bools]) -> None:
        self.costs, self.allowed = costs, allowed
        self.num_layers = len(costs.forward)
        M = costs.num_microbatches
        self.forward_weight = float(M - 1) or _TIE_BREAK
        self.backward_weight = float(M - 2) if costs.one_shorter else self.forward_weight
        self.total_backward = _running_sum(costs.backward)
        self.total_last = _running_sum(costs.last_backward)
        self.last_left = self.total_last[-1] - self.total_last
        forward, backward = self._stage_seconds()
        self.forward, self.backward = self._table(forward), self._table(backward)
        self.both = self._table(forward + backward)
        copies = np.broadcast_to(costs.transfer, forward.shape)
        self.copies = self._table(copies, np.add)
        self.copying = bool(np.any(costs.transfer))
        self.paths = self._path_tables(backward) if costs.one_shorter else []

    def run(self) -> list[int] | None:
        if not np.isfinite(self.both.rest[-1][0]):
            return None
        tables = [self.both, self.forward, self.backward, self.copies, *self.paths]
        best, bound = min(map(self._follow, tables), key=lambda found: found[1])
        for quick in (True, False):
            better = self._sweep(bound * (1 - _TOLERANCE), quick)
            if better is not None:
                best, bound = better
        return best

    def _stage_seconds(self) -> tuple[Floats, Floats]:
        """Return f and g including their share of copies, shape (L + 1, L + 1)."""
        total_forward = _running_sum(self.costs.forward)
        forward = total_forward - total_forward[:, None]
        backward = self.total_backward - self.total_backward[:, None]
        copies = self.costs.transfer
        if self.costs.overlapping:
            return np.maximum(forward, copies[:, None]), np.maximum(backward, copies)
        return forward + copies[:, None], backward + copies

    def _path_tables(self, backward: Floats) -> list[_Table]:
        """Return Σ_{q≥k} h_q + Σ_{q≤k} g_q of a stage k, without and with its own (M - 2)·g_k.
        Without copies. For the best cut, no path is shorter than the longest of them.
        """
        leaving = self.last_left[:, None] + self.total_backward
        return [self._table(leaving), self._table(leaving + self.backward_weight * backward)]

    def _table(self, stage: Floats, joined: np.ufunc = np.maximum) -> _Table:
        costs: list[Floats] = []
        for left, allowed in enumerate(self.allowed):
            same = left > 0 and allowed is self.allowed[left - 1]
            costs.append(costs[-1] if same else np.where(allowed, stage, np.inf))
        return _Table(stage, least_rest(costs, joined), joined)

    def _follow(self, table: _Table) -> tuple[list[int], float]:
        labels, ends = self._start(), [0]
        for left, allowed in reversed(list(enumerate(self.allowed))):
            onward = table.joined(table.stage[ends[-1]], table.rest[left])
            onward[~allowed[ends[-1]]] = np.inf
            ends.append(int(np.argmin(onward)))
            labels = self._extend(labels, np.array([0]), np.array(ends[-1:]))
        return ends, float(self._bound(labels, 0)[0])

    def _sweep(self, bound: float, quick: bool) -> tuple[list[int], float] | None:
        """Return the best cut below the bound and its cost, or None. With `quick`, keeps one label
        per prefix, and may miss the best cut.
        """
        labels = self._start()
        history: list[_Step] = []
        for left in reversed(range(len(self.allowed))):
            parents, ends = self._candidates(labels, left, bound)
            grown = self._raised(self._extend(labels, parents, ends), left)
            least = self._bound(grown, left)
            kept = np.flatnonzero(least < bound)
            grown, least = _take(grown, kept), least[kept]
            if not len(kept):
                return None
            chosen = _least_of_each(grown.end, least) if quick else self._undominated(grown)
            labels = _take(grown, chosen)
            history.append((parents[kept[chosen]], labels.end))
        cost = self._bound(labels, 0)
        best = int(np.argmin(cost))
        return _trace(history, best), float(cost[best])

    def _start(self) -> _Labels:
        zero = np.zeros(1)
        return _Labels(np.zeros(1, dtype=np.int64), zero, zero, zero, zero)

    def _candidates(self, labels: _Labels, left: int, bound: float) -> _Step:
        """Return labels and possible ends of their next stage, with `left` stages after it."""
        starts, row = np.unique(labels.end, return_inverse=True)
        stages = _Labels(
            np.arange(self.num_layers + 1),
            self.costs.transfer,
            self.forward.stage[starts],
            self.backward.stage[starts],
            np.zeros(1),
        )
        fits = self.allowed[left][starts] & (self._bound(stages, left) < bound)
        ends = np.nonzero(fits)[1]
        counts = fits.sum(axis=1)
        first = np.cumsum(counts) - counts
        repeats = counts[row]
        parents = np.repeat(np.arange(len(row)), repeats)
        within = np.arange(len(parents)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        return parents, ends[first[row][parents] + within]

    def _extend(self, labels: _Labels, parents: Ints, ends: Ints) -> _Labels:
        old = _take(labels, parents)
        return _Labels(
            ends,
            old.copies + self.costs.transfer[ends],
            np.maximum(old.slowest_forward, self.forward.stage[old.end, ends]),
            np.maximum(old.slowest_backward, self.backward.stage[old.end, ends]),
            self._longer_path(old, ends) if self.costs.one_shorter else old.path,
        )

    def _longer_path(self, labels: _Labels, ends: Ints) -> Floats:
        weight, copy = self.backward_weight, self.costs.transfer[ends]
        backward = self.total_backward[ends] - self.total_backward[labels.end]
        last = self.total_last[ends] - self.total_last[labels.end]
        spent = self.total_backward[ends] + labels.copies
        slowest, path = labels.slowest_backward, labels.path
        if not self.costs.overlapping:
            usual = spent + copy + weight * np.maximum(slowest, backward + copy)
            return np.asarray(last + copy + np.maximum(path, usual))
        slowest = np.maximum(slowest, backward)
        path = last + np.maximum(path, spent + weight * slowest)
        usual = spent + copy + weight * np.maximum(slowest, copy)
        return np.asarray(copy + np.maximum(path, usual))

    def _bound(self, labels: _Labels, left: int) -> Floats:
        """Return a lower bound on a label's final cost, which is exact if no stages are left."""
        end = labels.end
        forward = np.maximum(labels.slowest_forward, self.forward.rest[left][end])
        backward = np.maximum(labels.slowest_backward, self.backward.rest[left][end])
        both = np.maximum(forward + backward, self.both.rest[left][end])
        copies = 2 * (labels.copies + self.copies.rest[left][end])
        if not self.costs.one_shorter:
            return np.asarray(copies + self.forward_weight * both)
        usual = forward + copies + self.total_backward[-1] + self.costs.last_backward[-1]
        if self.backward_weight:  # 0 · infinity is not a number
            usual = usual + self.backward_weight * both
        path = labels.path + self.last_left[end] + copies - labels.copies
        return np.asarray(np.maximum(usual, path + self.forward_weight * forward))

    def _raised(self, labels: _Labels, left: int) -> _Labels:
        """Raise numbers to what they reach in any case, so that more labels become equal."""
        end = labels.end
        forward = np.maximum(labels.slowest_forward, self.forward.rest[left][end])
        if not self.costs.one_shorter:
            backward = np.maximum(labels.slowest_backward, self.backward.rest[left][end])
            return labels._replace(slowest_forward=forward, slowest_backward=backward)
        if not left:
            return labels
        # D depends on the slowest stage so far, not on the slowest at the end, so it is not raised.
        plain, own = (table.rest[left][end] for table in self.paths)
        onward = np.maximum(plain + self.backward_weight * labels.slowest_backward, own)
        path = np.maximum(labels.path, onward + labels.copies - self.last_left[end])
        return labels._replace(slowest_forward=forward, path=path)

    def _undominated(self, labels: _Labels) -> Ints:
        """Return the labels that no other of the same prefix dominates, and perhaps a few more."""
        columns = [labels.slowest_forward]
        columns += [labels.slowest_backward] if self.backward_weight else []
        columns += [labels.path] if self.costs.one_shorter else []
        columns += [labels.copies] if self.copying else []
        order = np.lexsort((*reversed(columns), labels.end))
        if len(columns) == 2:
            return order[_falling(labels.end[order], columns[1][order])]
        return _thin_out(order, labels.end, columns[1:])


def _running_sum(values: Floats) -> Floats:
    return np.concatenate(([0.0], np.cumsum(values)))


def _take(labels: _Labels, which: Ints) -> _Labels:
    end, copies, forward, backward, path = labels
    return _Labels(end[which], copies[which], forward[which], backward[which], path[which])


def _falling(group: Ints, values: Floats) -> Bools:
    """Return which values are below all earlier ones of their group; groups are contiguous."""
    number = np.unique(group, return_inverse=True)[1]
    rank = np.unique(values, return_inverse=True)[1]
    # Every group starts below all earlier groups.
    key = rank - number * (len(values) + 1)
    lowest = np.minimum.accumulate(key)
    falling = np.ones(len(key), dtype=bool)
    falling[1:] = key[1:] < lowest[:-1]
    return falling


def _thin_out(order: Ints, group: Ints, columns: Sequence[Floats]) -> Ints:
    """Drop labels that are no better than a neighbour before them in the sorted group."""
    for distance in range(1, _NEIGHBOURS + 1):
        if distance >= len(order):
            break
        before, after = order[:-distance], order[distance:]
        beaten = group[before] == group[after]
        if not beaten.any():
            break
        for column in columns:
            beaten &= column[before] <= column[after]
        kept = np.ones(len(order), dtype=bool)
        kept[distance:] = ~beaten
        order = order[kept]
    return order


def _least_of_each(group: Ints, values: Floats) -> Ints:
    order = np.lexsort((values, group))
    return order[np.unique(group[order], return_index=True)[1]]


def _trace(history: Sequence[_Step], last: int) -> list[int]:
    ends = []
    for parents, positions in reversed(history):
        ends.append(int(positions[last]))
        last = int(parents[last])
    return [0, *reversed(ends)]
