"""The best batch size of each column, an allocation of a job, among its `candidates`.

As in Pollux and AdaptDL, the geometric candidates come first, then the neighbours of the best one,
in a and in s. If there are few candidates in total, or no geometric candidate fits, all are tried.
The result equals that of evaluating all candidates, at a lower cost:

* with many candidates, goodput is first estimated in single precision, and only candidates within
  the error of the best estimate are evaluated;
* duplicates of a candidate, or of the choice whose neighbours are tried, are skipped;
* where a choice only counts if it is better by `_BETTER`, neighbours are skipped if a bound
  excludes that (`GoodputOf.most_nearby`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .batch_bounds import Bools, ColumnBounds, Integers
from .candidates import (
    Candidates,
    compact,
    has_few,
    list_all,
    list_atomic,
    list_measured,
    propose,
)

Floats = NDArray[np.float64]


class GoodputOf(Protocol):
    """Goodput of candidates; columns are indices, shape (columns,)."""

    def __call__(self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers) -> Floats:
        """Return goodput, (candidates, columns); the sizes have that shape or (candidates, 1)."""

    def of_pairs(self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers) -> Floats:
        """Return goodput of candidates of any columns, all of shape (pairs,)."""

    def estimate(
        self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers
    ) -> NDArray[np.float32] | None:
        """Return an estimate of the shape of a call's result; None: no estimate.

        If two estimates of one column differ by more than `ESTIMATE_ERROR` of the larger one,
        goodput has the same order. Units differ between columns.
        """

    def most_nearby(
        self, columns: Integers, atomic_bsz: Integers, accum_steps: Integers, nearby: Nearby
    ) -> NDArray[np.float32] | None:
        """Return a bound on goodput nearby, (columns,), relative to a candidate's; None: no bound.
        It is accurate to `ESTIMATE_ERROR`.
        """


class Nearby(NamedTuple):
    """A range of samples of one replica for each number of steps; (numbers, columns)."""

    more_steps: Integers
    """Additional accumulation steps compared with a candidate, at least 0: (numbers, 1)."""
    least: Floats
    most: Floats
    """Below `least` if the number of steps is impossible."""


_ROUNDS = 2  # of trying neighbours of the best candidate
_NEIGHBOUR_STEPS = np.array([-1, 0, 1, 2, 3])
_NEIGHBOUR_BLOCKS = np.array([-1, 0, 1, 2])
_BETTER = 1.003  # how much better a choice must be to replace AdaptDL's
_FEW_TO_ESTIMATE = 4096  # candidates of all columns up to which all are evaluated at once
_CHUNK = 1024  # columns evaluated together: a few arrays of their candidates fit a cache
ESTIMATE_ERROR = 1e-4
"""Fifty times the error of single precision."""


class BatchChoice(NamedTuple):
    """The best candidate of each column; arrays of shape (columns,), 0 if none is allowed."""

    goodput: Floats
    atomic_bsz: Integers
    accum_steps: Integers


def choose(
    bounds: ColumnBounds,
    num_replicas: Integers,
    num_microbatches: int,
    goodput_of: GoodputOf,
    measured: Integers | None = None,
) -> BatchChoice:
    """Return the candidate with the highest goodput for each column, of shape (columns,).

    Atomic batch sizes that are not a multiple of M are only tried in columns that allow no
    multiple. With several jobs, `has_few` must be equal for all. `measured` are atomic batch sizes
    that are always tried, for a single column: one may be much better than its neighbours.
    """
    columns = num_replicas.shape
    choice = BatchChoice(np.zeros(columns), np.zeros(columns, int), np.zeros(columns, int))
    possible = bounds.leave_room(num_replicas)
    for multiple in dict.fromkeys((num_microbatches, 1)):
        todo = np.flatnonzero(possible & (choice.atomic_bsz == 0))
        if not todo.size:
            break
        _choose_geometric(choice, bounds, num_replicas, multiple, goodput_of, todo)
        theirs = [values.copy() for values in choice]
        few = has_few(bounds.jobs[0], multiple)
        if few:
            every = list_all(bounds.at(todo), num_replicas[todo], multiple)
            _take_better(choice, todo, _best(goodput_of, todo, every))
        if measured is not None:
            known = list_measured(bounds.at(todo), num_replicas[todo], multiple, measured)
            _take_better(choice, todo, _best(goodput_of, todo, known))
        for column in todo[choice.atomic_bsz[todo] == 0]:
            one = np.array([column])
            found = list_atomic(bounds.at(one), num_replicas[one], multiple)
            _take_better(choice, one, _best(goodput_of, one, found))
        if not few:
            near = todo[choice.atomic_bsz[todo] > 0]
            if bounds.needs_two_batches:
                may_gain = _may_gain(choice, bounds, num_replicas, multiple, goodput_of, near)
                near = near[may_gain | (theirs[0][near] == 0)]
            _refine(choice, bounds, num_replicas, multiple, goodput_of, near)
        if bounds.needs_two_batches:
            as_good = (theirs[0] > 0) & (choice.goodput <= _BETTER * theirs[0])
            for chosen, values in zip(choice, theirs, strict=True):
                chosen[as_good] = values[as_good]
    return choice


def _choose_geometric(
    choice: BatchChoice,
    bounds: ColumnBounds,
    num_replicas: Integers,
    multiple: int,
    goodput_of: GoodputOf,
    columns: Integers,
) -> None:
    replicas, bounds = num_replicas[columns], bounds.at(columns)
    # They depend on bounds and R only, which jobs often have in common.
    first, kinds = bounds.distinct(replicas)
    own, count = bounds.at(first), replicas[first]
    proposal = propose(own, count, multiple)
    if bounds.needs_two_batches:
        up = proposal.up
        up = up._replace(allowed=up.allowed & own.allow_atomic(up.atomic_bsz))
        # AdaptDL's choice, which ignores the largest batch size, if that is allowed.
        theirs = _best(goodput_of, columns, compact(up), kinds)
        allowed = bounds.allow(replicas, theirs.atomic_bsz, theirs.accum_steps)
        _store(choice, columns, theirs, allowed)
        left = np.flatnonzero(~allowed)
        columns, kinds = columns[left], kinds[left]
    if columns.size:
        both = proposal.both
        within = own.allow(count, both.atomic_bsz, both.accum_steps)
        both = compact(both._replace(allowed=both.allowed & within))
        _take_better(choice, columns, _best(goodput_of, columns, both, kinds))


def _may_gain(
    choice: BatchChoice,
    bounds: ColumnBounds,
    num_replicas: Integers,
    multiple: int,
    goodput_of: GoodputOf,
    columns: Integers,
) -> Bools:
    """Return where `_refine` may find an improvement by `_BETTER`, from a bound on its range.

    In two rounds of at most `up` additional steps, s + t steps are reached from at most s + min(t +
    1, up) steps, and in each the samples of one replica change by less than two blocks per step.
    """
    replicas, bounds = num_replicas[columns], bounds.at(columns)
    sizes, steps = choice.atomic_bsz[columns], choice.accum_steps[columns]
    samples = sizes * (steps + 1)
    up = int(_NEIGHBOUR_STEPS.max()) if bounds.accumulation else 0
    more = np.arange(_ROUNDS * up + 1)[:, None]
    reach = 2 * multiple * (2 * (steps + 1) + more + np.minimum(more + 1, up))
    most = samples + reach
    # Fewer steps cannot be bounded by more steps: none of those may be possible.
    fewer = (steps > 0) & (samples - reach[0] <= bounds.max_atomic_bsz * steps)
    most = np.where(bounds.min_atomic_bsz * (steps + more + 1) <= most, most, 0)
    if not bounds.rounds_up:
        most = np.minimum(most, bounds.max_batch_size / replicas)
    least = np.maximum(np.maximum(samples - reach, 0), bounds.init_batch_size / replicas)
    gain = goodput_of.most_nearby(columns, sizes, steps, Nearby(more, least, most))
    if gain is None:
        return np.ones(len(columns), bool)
    may_gain: Bools = fewer | ~(gain <= _BETTER * (1 - 2 * ESTIMATE_ERROR))
    return may_gain


def _refine(
    choice: BatchChoice,
    bounds: ColumnBounds,
    num_replicas: Integers,
    multiple: int,
    goodput_of: GoodputOf,
    columns: Integers,
) -> None:
    """Try the neighbours of the choice: about the same batch in fewer or more steps."""
    changes = (_NEIGHBOUR_STEPS if bounds.accumulation else np.array([0]))[:, None]
    for _ in range(_ROUNDS):
        if not columns.size:
            return
        before, steps = choice.atomic_bsz[columns], choice.accum_steps[columns]
        accum_steps = np.maximum(steps + changes, 0)
        blocks = before * (steps + 1) // ((accum_steps + 1) * multiple)
        sizes = (blocks[:, None] + _NEIGHBOUR_BLOCKS[:, None]) * multiple
        atomic_bsz = np.maximum(sizes, multiple).reshape(-1, len(columns))
        accum_steps = np.repeat(accum_steps, len(_NEIGHBOUR_BLOCKS), axis=0)
        allowed = bounds.at(columns).allow(num_replicas[columns], atomic_bsz, accum_steps)
        # Steps cannot be negative.
        allowed &= np.repeat(steps + changes >= 0, len(_NEIGHBOUR_BLOCKS), axis=0)
        itself = (atomic_bsz == before) & (accum_steps == steps)
        candidates = Candidates(atomic_bsz, accum_steps, allowed)
        near = _best(goodput_of, columns, candidates, known=itself)
        better = near.goodput > choice.goodput[columns]
        _store(choice, columns, near, better)
        # Neighbours of an unchanged choice have been tried.
        columns = columns[better]


def _take_better(choice: BatchChoice, columns: Integers, found: BatchChoice) -> None:
    _store(choice, columns, found, found.goodput > choice.goodput[columns])


def _store(choice: BatchChoice, columns: Integers, found: BatchChoice, kept: Bools) -> None:
    for chosen, values in zip(choice, found, strict=True):
        chosen[columns[kept]] = values[kept]


def _best(
    goodput_of: GoodputOf,
    columns: Integers,
    candidates: Candidates,
    kinds: Integers | None = None,
    known: Bools | None = None,
) -> BatchChoice:
    """Return the best allowed candidate of each column; goodput -1.0 if no new one may be better.
    `candidates` are of each column or, with `kinds`, of each kind; `known` ones are excluded.
    """
    best = BatchChoice(np.full(len(columns), -1.0), *np.zeros((2, len(columns)), np.int64))
    many = len(candidates.allowed) * len(columns) > _FEW_TO_ESTIMATE
    if many:
        singles = [part.astype(np.float32) for part in candidates[:2]]
    few: list[tuple[Integers, Integers, Integers]] = []
    for places, here in _chunks(candidates, kinds, len(columns)):
        near, allowed = None, here.of(candidates.allowed)
        if many:
            estimate = goodput_of.estimate(columns[places], *map(here.of, singles))
            near = _nearly_best(estimate, allowed)
        new = True if known is None else ~known[:, places]
        if near is None:
            sizes, steps = map(here.of, candidates[:2])
            goodput = np.where(allowed & new, goodput_of(columns[places], sizes, steps), -1.0)
            first = np.argmax(goodput, axis=0), np.arange(len(places))
            for values, found in zip(best, (goodput, sizes, steps), strict=True):
                values[places] = found[first]
        else:
            rows, number = np.nonzero(near & new)
            kind = places[number] if kinds is None else kinds[places[number]]
            sizes, steps = (part[rows, kind] for part in candidates[:2])
            few.append((places[number], sizes, steps))
    if few:
        _best_of_few(best, goodput_of, columns, *map(np.concatenate, zip(*few, strict=True)))
    return best


class _Here(NamedTuple):
    rows: int
    kinds: Integers | slice

    def of(self, part: NDArray[Any]) -> NDArray[Any]:
        if isinstance(self.kinds, slice):
            return part[: self.rows, self.kinds]
        return part[: self.rows].take(self.kinds, axis=1)


def _chunks(
    candidates: Candidates, kinds: Integers | None, num_columns: int
) -> Iterator[tuple[Integers, _Here]]:
    if not candidates.allowed.size:
        return
    if kinds is None:
        for first in range(0, num_columns, _CHUNK):
            places = np.arange(first, min(first + _CHUNK, num_columns))
            yield places, _Here(len(candidates.allowed), slice(first, first + _CHUNK))
        return
    # Columns with equally many candidates leave no gaps.
    counts = np.count_nonzero(candidates.allowed, axis=0)[kinds]
    order = np.argsort(counts, kind="stable")
    for first in range(int(np.count_nonzero(counts == 0)), num_columns, _CHUNK):
        places = order[first : first + _CHUNK]
        yield places, _Here(int(counts[places[-1]]), kinds[places])


def _nearly_best(estimate: NDArray[np.float32] | None, allowed: Bools) -> Bools | None:
    if estimate is None:
        return None
    if not allowed.all():
        estimate[~allowed] = -1.0
    top = estimate.max(axis=0)
    if not np.isfinite(top).all():
        return None
    near: Bools = estimate >= np.abs(top) * np.float32(1.0 - ESTIMATE_ERROR)
    return near


def _best_of_few(
    best: BatchChoice,
    goodput_of: GoodputOf,
    columns: Integers,
    places: Integers,
    sizes: Integers,
    steps: Integers,
) -> None:
    """Write the best candidate of each place; candidates are ordered by places and rows."""
    order = np.argsort(places, kind="stable")
    places, sizes, steps = places[order], sizes[order], steps[order]
    found = goodput_of.of_pairs(columns[places], sizes, steps)
    first = np.flatnonzero(np.diff(places, prepend=-1))
    if first.size:
        best.goodput[places[first]] = np.maximum.reduceat(found, first)
    # In reverse, so that the first of equal candidates is written last.
    equal = np.flatnonzero(found == best.goodput[places])[::-1]
    best.atomic_bsz[places[equal]] = sizes[equal]
    best.accum_steps[places[equal]] = steps[equal]
